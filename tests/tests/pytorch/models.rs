//! The trainer's GPT against PyTorch's.

use std::fs;

use elastic_models::gpt::{Gpt, Size, Tokens};
use elastic_tests::prelude::*;
use elastic_trainer::Model;
use elastic_trainer::random::unit;

#[test]
fn a_gpts_gradient_is_pytorchs() {
    let Some(torch) = Torch::find() else { return };
    let size = Size { vocabulary: 97, context: 80, layers: 3, heads: 4, width: 32 };
    let (gpt, time, sequences) = (Gpt::new(size), 72, 5);
    let parameters: Vec<f32> = gpt
        .init(1)
        .unwrap()
        .iter()
        .enumerate()
        .map(|(i, value)| value + 0.1 * (unit(1 << 50 | i as u64) - 0.5))
        .collect();
    let tokens = |salt: u64| -> Vec<u32> {
        (0..time * sequences).map(|i| (unit(salt << 40 | i as u64) * size.vocabulary as f32) as u32).collect()
    };
    let batch = Tokens::new(time, tokens(1), tokens(2));

    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let bytes = |numbers: &[f32]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>();
    let longs = |tokens: &[u32]| tokens.iter().flat_map(|&token| i64::from(token).to_le_bytes()).collect::<Vec<_>>();
    fs::write(path("parameters"), bytes(&parameters)).unwrap();
    fs::write(path("inputs"), longs(&batch.inputs)).unwrap();
    fs::write(path("targets"), longs(&batch.targets)).unwrap();
    let Size { vocabulary, context, layers, heads, width } = size;
    let numbers = [vocabulary, context, layers, heads, width, time].map(|number| number.to_string());
    let ran = torch.run(&torch::script("gradients.py")).args(numbers).arg(folder.path()).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let said = String::from_utf8(ran.stdout).unwrap();
    let (their_loss, names) = said.split_once('\n').unwrap();
    let ours: Vec<String> = gpt.tensors().iter().map(|tensor| format!("{} {:?}", tensor.name, tensor.shape)).collect();
    assert_eq!(names.lines().collect::<Vec<_>>(), ours, "names and shapes");

    let mut gradient = vec![0.0; gpt.parameters()];
    let loss = gpt.pass(&parameters, &batch, &mut Default::default(), &mut gradient, &mut |_| ());
    let their_loss = their_loss.parse::<f32>().unwrap();
    assert!((loss - their_loss).abs() < 1e-5 * loss, "loss {loss}, PyTorch has {their_loss}");
    let theirs = fs::read(path("gradient")).unwrap();
    let theirs: Vec<f32> = theirs.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    assert_eq!(theirs.len(), gradient.len());
    for tensor in gpt.tensors() {
        let (ours, theirs) = (&gradient[tensor.range.clone()], &theirs[tensor.range.clone()]);
        let largest = theirs.iter().fold(0.0f32, |top, value| top.max(value.abs()));
        let error = ours.iter().zip(theirs).fold(0.0f32, |top, (a, b)| top.max((a - b).abs()));
        assert!(largest > 0.0 && error < 1e-4 * largest, "{}: differs by {error} of {largest}", tensor.name);
    }
}
