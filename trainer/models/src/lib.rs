//! What the program `elastic-trainer` trains: a perceptron and GPT-2, with gradients written by hand, and their data. To
//! the library [`elastic_trainer`] they are models as any other.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

mod affine;
mod attention;
mod data;
pub mod gpt;
mod matmul;
pub mod mlp;
mod pointwise;
pub mod tasks;

pub use data::digits::Digits;
pub use gpt::Gpt;
pub use mlp::{Mlp, Rows};

#[cfg(test)]
mod tests {
    use elastic_trainer::random::unit;
    use elastic_trainer::{Gradient, Model, Step};

    use super::gpt::{Size, Tokens};
    use super::*;

    fn bits(numbers: &[f32]) -> Vec<u32> {
        numbers.iter().map(|number| number.to_bits()).collect()
    }

    /// The length of each slice that was passed to `done`.
    fn told<M: Model>(model: &M, batch: &M::Batch) -> Vec<usize> {
        let first = model.init(3).unwrap();
        let parameters: Vec<f32> = first.iter().enumerate().map(|(i, p)| p + 0.1 * unit(i as u64)).collect();
        let (mut numbers, mut ends) = (vec![f32::NAN; parameters.len()], Vec::new());
        let done = &mut |end: &[f32]| ends.push(bits(end));
        let step = Step::new(0, 1, 0, &[0]);
        let mut replica = model.replica().unwrap();
        model.gradient(&step, &parameters, batch, &mut replica, &mut Gradient::new(&mut numbers, done)).unwrap();
        let whole = bits(&numbers);
        for end in &ends {
            assert_eq!(*end, whole[whole.len() - end.len()..], "a reported part has changed");
        }
        ends.iter().map(Vec::len).collect()
    }

    #[test]
    fn what_a_pass_back_tells_of_is_final() {
        let inputs = (0..4 * 6).map(unit).collect();
        let perceptron = told(&Mlp::new(&[6, 7, 5, 3]), &Rows { inputs, labels: vec![0, 2, 1, 2] });
        assert_eq!(perceptron, [18, 18 + 40, 18 + 40 + 49], "a layer each time, the last one first");

        let gpt = Gpt::new(Size { vocabulary: 11, context: 4, layers: 2, heads: 2, width: 6 });
        let ends = told(&gpt, &Tokens::new(4, vec![1, 5, 2, 0, 7, 7, 10, 3], vec![5, 2, 0, 4, 7, 10, 3, 9]));
        assert_eq!(ends.len(), 5, "the norm, and each block's halves");
        assert_eq!(*ends.last().unwrap(), gpt.parameters() - (11 + 4) * 6, "all but the embeddings");
        assert!(ends.is_sorted());
    }
}
