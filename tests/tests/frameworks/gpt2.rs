//! GPT-2 between `elastic-trainer` and the real `transformers`.

use elastic_models::{Gpt, gpt::Decoder, gpt::pretrained::Pretrained};

use super::*;

const TOKENS: [u32; 7] = [5, 96, 0, 41, 41, 12, 77];

/// The logits after each of the tokens, by `transformers`.
async fn theirs(python: &Torch, folder: &Path, model: &str) -> Vec<Vec<f32>> {
    let commands = format!(
        r#"python - <<'END'
import json, torch
from transformers import GPT2LMHeadModel
model, report = GPT2LMHeadModel.from_pretrained("{model}", output_loading_info=True)
assert not report["missing_keys"] and not report["unexpected_keys"], report
model.eval().save_pretrained("{model}-again")
with torch.no_grad():
    print(json.dumps(model(torch.tensor([{TOKENS:?}])).logits[0].tolist()))
END"#
    );
    let out = typed(python, folder, &commands).await;
    let line = out.lines().find(|line| line.starts_with("[[")).unwrap_or_else(|| panic!("{out}"));
    serde_json::from_str(line).unwrap()
}

/// The same, by the trainer, and the model's parameters.
fn ours(folder: &Path) -> (Vec<Vec<f32>>, Vec<f32>) {
    let found = Pretrained::open(folder).unwrap();
    let (gpt, parameters) = (Gpt::new(found.size()), found.read().unwrap());
    let mut decoder = Decoder::new(&gpt, &parameters);
    let logits = TOKENS.iter().map(|token| decoder.push(*token).to_vec()).collect();
    (logits, parameters)
}

fn assert_close(ours: &[Vec<f32>], theirs: &[Vec<f32>]) {
    assert_eq!(ours.len(), theirs.len());
    let pairs = ours.iter().flatten().zip(theirs.iter().flatten());
    let furthest = pairs.map(|(ours, theirs)| (ours - theirs).abs()).fold(0.0, f32::max);
    let largest = theirs.iter().flatten().fold(0.0f32, |most, logit| most.max(logit.abs()));
    println!("logits up to {largest}, at most {furthest} apart");
    assert!(furthest < 1e-4 && largest > 0.5, "{furthest} apart, up to {largest}");
}

#[tokio::test]
#[ignore = "needs the frameworks: make test-frameworks"]
async fn gpt_2_comes_from_transformers_is_trained_and_goes_back() {
    let Some(python) = Torch::with_frameworks() else { return };
    let folder = tempfile::tempdir().unwrap();
    // Given a model whose every number matters, and tokens as nanoGPT writes them
    let make = r#"python - <<'END'
import numpy, torch
from transformers import GPT2Config, GPT2LMHeadModel
torch.manual_seed(3)
model = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=32, n_embd=24, n_layer=3, n_head=4))
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
model.save_pretrained("theirs")
numpy.random.default_rng(0).integers(0, 97, 2000).astype(numpy.uint16).tofile("train.bin")
END"#;
    typed(&python, folder.path(), make).await;
    let (before, first) = ours(&folder.path().join("theirs"));
    assert_close(&before, &theirs(&python, folder.path(), "theirs").await);

    // When it is trained for 20 steps, then transformers finds the same logits in the export
    let train = "elastic-trainer gpt --init-from theirs --tokens train.bin --max-steps 20 --checkpoint-dir checkpoints \
        --device cpu && elastic-trainer export checkpoints ours";
    typed(&python, folder.path(), train).await;
    let (after, trained) = ours(&folder.path().join("ours"));
    assert_close(&after, &theirs(&python, folder.path(), "ours").await);
    assert!(before != after && first != trained);
    // And what transformers saves of it has the same bits.
    assert!(ours(&folder.path().join("ours-again")).1 == trained);
}

#[tokio::test]
#[ignore = "needs the frameworks: make test-frameworks"]
async fn a_model_of_text_brings_its_tokenizer() {
    let Some(python) = Torch::with_frameworks() else { return };
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("text"), "A text that repeats itself. ".repeat(200)).unwrap();
    let commands = r#"
        elastic-trainer gpt --text text --layers 1 --width 32 --batch 16 --lr 0.01 --max-steps 200 --device cpu \
            --checkpoint-dir checkpoints
        elastic-trainer export checkpoints ours
        elastic-trainer generate ours --prompt 'A text' --tokens 40 --temperature 0 > generated
        python - <<'END'
from transformers import AutoTokenizer, GPT2LMHeadModel
tokenizer, model = AutoTokenizer.from_pretrained("ours"), GPT2LMHeadModel.from_pretrained("ours")
text = "Zoë, 5 \t\n"
assert tokenizer(text)["input_ids"] == list(text.encode()), tokenizer(text)
assert tokenizer.decode(list(text.encode())) == text
inputs = tokenizer("A text", return_tensors="pt", return_token_type_ids=False)
found = tokenizer.decode(model.generate(**inputs, max_new_tokens=40, do_sample=False, pad_token_id=0)[0])
generated = open("generated").read()
assert found + "\n" == generated, (found, generated)
print("generated", generated)
END"#;
    let out = typed(&python, folder.path(), commands).await;
    assert!(out.contains("generated A text that repeats"), "{out}");
}
