//! The pass against the definition in f64, which shares nothing with it.

use elastic_trainer::random::unit;

use super::*;

/// Reads a pair's weight and bias in f64.
fn pair(parameters: &[f64], pair: &Affine) -> (Vec<f64>, Vec<f64>) {
    (parameters[pair.weight.clone()].to_vec(), parameters[pair.bias.clone()].to_vec())
}

fn norm(row: &[f64], (weight, bias): &(Vec<f64>, Vec<f64>)) -> Vec<f64> {
    let mean = row.iter().sum::<f64>() / row.len() as f64;
    let variance = row.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / row.len() as f64;
    row.iter().zip(weight).zip(bias).map(|((value, w), b)| (value - mean) / (variance + 1e-5).sqrt() * w + b).collect()
}

fn linear(row: &[f64], (weight, bias): &(Vec<f64>, Vec<f64>)) -> Vec<f64> {
    let output = |(out, bias): (usize, &f64)| {
        bias + row.iter().enumerate().map(|(i, value)| value * weight[out * row.len() + i]).sum::<f64>()
    };
    bias.iter().enumerate().map(output).collect()
}

fn reference_loss(gpt: &Gpt, parameters: &[f64], batch: &Tokens) -> f64 {
    let Size { heads, width, vocabulary, .. } = gpt.size;
    let (tokens, positions) = (&parameters[gpt.places.tokens.clone()], &parameters[gpt.places.positions.clone()]);
    let mut loss = 0.0;
    for (inputs, targets) in batch.inputs.chunks(batch.time).zip(batch.targets.chunks(batch.time)) {
        let embed = |(place, &token): (usize, &u32)| -> Vec<f64> {
            (0..width).map(|i| tokens[token as usize * width + i] + positions[place * width + i]).collect()
        };
        let mut stream: Vec<Vec<f64>> = inputs.iter().enumerate().map(embed).collect();
        for block in &gpt.places.blocks {
            let triples: Vec<Vec<f64>> = stream
                .iter()
                .map(|row| linear(&norm(row, &pair(parameters, &block.norm_1)), &pair(parameters, &block.attention)))
                .collect();
            let columns = width / heads;
            for (place, row) in stream.iter_mut().enumerate() {
                let mut attended = vec![0.0; width];
                for head in 0..heads {
                    let at = |row: usize, which: usize, i: usize| triples[row][which * width + head * columns + i];
                    let score = |past: usize| -> f64 {
                        (0..columns).map(|i| at(place, 0, i) * at(past, 1, i)).sum::<f64>() / (columns as f64).sqrt()
                    };
                    let weights: Vec<f64> = (0..=place).map(|past| score(past).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    for i in 0..columns {
                        attended[head * columns + i] =
                            weights.iter().enumerate().map(|(past, weight)| weight / total * at(past, 2, i)).sum();
                    }
                }
                let out = linear(&attended, &pair(parameters, &block.attention_out));
                row.iter_mut().zip(out).for_each(|(value, more)| *value += more);
            }
            for row in &mut stream {
                let mut hidden = linear(&norm(row, &pair(parameters, &block.norm_2)), &pair(parameters, &block.up));
                for x in &mut hidden {
                    let inner = (2.0 / std::f64::consts::PI).sqrt() * (*x + 0.044_715 * x.powi(3));
                    *x *= 0.5 * (1.0 + inner.tanh());
                }
                let out = linear(&hidden, &pair(parameters, &block.down));
                row.iter_mut().zip(out).for_each(|(value, more)| *value += more);
            }
        }
        for (row, &target) in stream.iter().zip(targets) {
            let last = norm(row, &pair(parameters, &gpt.places.norm));
            let scores: Vec<f64> = (0..vocabulary)
                .map(|token| (0..width).map(|i| last[i] * tokens[token * width + i]).sum::<f64>())
                .collect();
            loss += scores.iter().map(|score| score.exp()).sum::<f64>().ln() - scores[target as usize];
        }
    }
    loss
}

fn batch(gpt: &Gpt, sequences: usize, time: usize) -> Tokens {
    let token = |key: u64| (unit(key) * gpt.size.vocabulary as f32) as u32;
    let count = (sequences * time) as u64;
    Tokens::new(time, (0..count).map(token).collect(), (0..count).map(|i| token(1 << 40 | i)).collect())
}

/// Far from the first parameters, so that every part matters.
fn parameters(gpt: &Gpt) -> Vec<f32> {
    gpt.init(5).unwrap().iter().enumerate().map(|(i, value)| value + 0.4 * (unit(1 << 50 | i as u64) - 0.5)).collect()
}

#[test]
fn gradients_match_finite_differences_in_f64() {
    let sizes = [
        (Size { vocabulary: 11, context: 5, layers: 2, heads: 2, width: 6 }, 2, 5),
        (Size { vocabulary: 7, context: 4, layers: 1, heads: 1, width: 4 }, 3, 3),
        // A context longer than a tile of attention.
        (Size { vocabulary: 5, context: 70, layers: 1, heads: 2, width: 4 }, 1, 67),
    ];
    for (size, sequences, time) in sizes {
        let gpt = Gpt::new(size);
        let parameters = parameters(&gpt);
        let (batch, mut room) = (batch(&gpt, sequences, time), Workspace::default());
        let mut gradient = vec![f32::NAN; gpt.parameters()];
        let loss = gpt.pass(&parameters, &batch, &mut room, &mut gradient, &mut |_| ());
        assert_eq!(loss, gpt.loss(&parameters, &batch, &mut room));

        let mut exact: Vec<f64> = parameters.iter().map(|&value| f64::from(value)).collect();
        let expected = reference_loss(&gpt, &exact, &batch);
        assert!((f64::from(loss) - expected).abs() < 1e-5 * expected, "loss {loss}, expected {expected}");
        let largest = gradient.iter().fold(0.0f32, |top, value| top.max(value.abs()));
        for place in 0..exact.len() {
            let (step, kept) = (1e-5, exact[place]);
            exact[place] = kept + step;
            let above = reference_loss(&gpt, &exact, &batch);
            exact[place] = kept - step;
            let below = reference_loss(&gpt, &exact, &batch);
            exact[place] = kept;
            let slope = (above - below) / (2.0 * step);
            let error = (f64::from(gradient[place]) - slope).abs();
            let name = &gpt.tensors.iter().find(|tensor| tensor.range.contains(&place)).unwrap().name;
            assert!(error < 3e-5 * f64::from(largest) + 1e-4 * slope.abs(), "{name}: {} for {slope}", gradient[place]);
        }
    }
}

#[test]
fn a_batch_in_pieces_has_the_same_gradient() {
    // Given more rows than are scored at once, and the same sequences in two batches.
    let gpt = Gpt::new(Size { vocabulary: 13, context: 32, layers: 1, heads: 2, width: 8 });
    let parameters = parameters(&gpt);
    let (whole, mut room) = (batch(&gpt, 12, 32), Workspace::default());
    let mut gradient = vec![0.0; gpt.parameters()];
    let loss = gpt.pass(&parameters, &whole, &mut room, &mut gradient, &mut |_| ());
    let (mut sum, mut loss_sum) = (vec![0.0; gpt.parameters()], 0.0);
    for half in 0..2 {
        let rows = half * 6 * 32..(half + 1) * 6 * 32;
        let part = Tokens::new(32, whole.inputs[rows.clone()].to_vec(), whole.targets[rows].to_vec());
        let mut more = vec![0.0; gpt.parameters()];
        loss_sum += gpt.pass(&parameters, &part, &mut room, &mut more, &mut |_| ());
        sum.iter_mut().zip(&more).for_each(|(sum, more)| *sum += more);
    }
    assert!((loss - loss_sum).abs() < 1e-3 * loss);
    for (one, two) in gradient.iter().zip(&sum) {
        assert!((one - two).abs() < 1e-3 + 1e-3 * one.abs(), "{one} {two}");
    }
}

#[test]
fn no_tokens_have_no_gradient() {
    let gpt = Gpt::new(Size { vocabulary: 3, context: 2, layers: 1, heads: 1, width: 2 });
    let mut gradient = vec![f32::NAN; gpt.parameters()];
    let (none, first) = (Tokens::new(2, Vec::new(), Vec::new()), gpt.init(0).unwrap());
    assert_eq!(gpt.pass(&first, &none, &mut Workspace::default(), &mut gradient, &mut |_| ()), 0.0);
    assert!(gradient.iter().all(|&value| value == 0.0));
}

#[test]
fn gpt_2_has_its_size_and_its_first_loss() {
    assert_eq!(Gpt::new(Size::GPT2).parameters(), 124_439_808);
    // Nothing is learned yet: every token is as likely.
    let gpt = Gpt::new(Size { vocabulary: 64, context: 16, layers: 2, heads: 4, width: 32 });
    let batch = batch(&gpt, 4, 16);
    let loss = gpt.loss(&gpt.init(1).unwrap(), &batch, &mut Workspace::default()) / 64.0;
    assert!((loss - 64f32.ln()).abs() < 0.05, "{loss}");
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let fits = Size { vocabulary: 3, context: 2, layers: 1, heads: 2, width: 4 };
    assert_eq!(fits.refusal(), None);
    assert_eq!(Size { heads: 0, ..fits }.refusal().unwrap(), "--heads is 0, not 1 to 1048576");
    assert_eq!(Size { heads: 3, ..fits }.refusal().unwrap(), "a width of 4 is not divisible by 3 heads");
}

#[test]
fn logits_of_one_token_after_the_other_are_those_of_a_pass() {
    // Given a sequence longer than a tile of attention
    let gpt = Gpt::new(Size { vocabulary: 11, context: 70, layers: 2, heads: 3, width: 12 });
    let (parameters, batch) = (parameters(&gpt), batch(&gpt, 1, 70));
    let mut decoder = Decoder::new(&gpt, &parameters);
    let mut loss = 0.0;
    for (&token, &target) in batch.inputs.iter().zip(&batch.targets) {
        let logits = decoder.push(token);
        let total: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
        loss += total.ln() - f64::from(logits[target as usize]);
    }
    let expected = f64::from(gpt.loss(&parameters, &batch, &mut Workspace::default()));
    assert!((loss - expected).abs() < 1e-5 * expected, "{loss} for {expected}");
    assert_eq!(decoder.length(), 70);
}
