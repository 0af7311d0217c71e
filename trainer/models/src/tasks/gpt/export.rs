//! `elastic-trainer export`: a checkpoint for `transformers`.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use elastic_trainer::Result;
use serde_json::{Map, Value, json};

use super::trained::Trained;
use crate::gpt::pretrained::{CONFIG, WEIGHTS, contents};

/// What to export.
#[derive(Debug, Clone, Args)]
pub struct Export {
    /// Folder that --checkpoint-dir named, or one checkpoint's in it
    pub dir: PathBuf,
    /// Folder to write; it must not exist
    pub folder: PathBuf,
    /// The step to export [default: the newest whole checkpoint]
    #[arg(long)]
    pub step: Option<u64>,
}

impl Export {
    /// Writes the folder: the weights last, without which it does not load.
    pub fn run(&self, out: &mut dyn Write) -> Result<()> {
        let Trained { gpt, parameters, is_of_bytes, step } = Trained::of_checkpoint(&self.dir, self.step)?;
        let (config, weights) = contents(&gpt, &parameters, is_of_bytes, step);
        let folder = &self.folder;
        let unwritable = |error: io::Error| format!("cannot write {}: {error}", folder.display());
        fs::create_dir(folder).map_err(unwritable)?;
        let write = |name: &str, bytes: &[u8]| fs::write(folder.join(name), bytes).map_err(unwritable);
        write(CONFIG, &config)?;
        if is_of_bytes {
            write("tokenizer.json", byte_tokenizer().to_string().as_bytes())?;
            let about = json!({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": gpt.size().context});
            write("tokenizer_config.json", about.to_string().as_bytes())?;
        }
        let temporary = format!("{WEIGHTS}.tmp");
        write(&temporary, &weights)?;
        fs::File::open(folder.join(&temporary)).and_then(|file| file.sync_all()).map_err(unwritable)?;
        fs::rename(folder.join(&temporary), folder.join(WEIGHTS)).map_err(unwritable)?;
        let megabytes = weights.len() as f64 / 1e6;
        Ok(writeln!(
            out,
            "step {step}: {megabytes:.1} MB in {}; GPT2LMHeadModel.from_pretrained loads it",
            folder.display()
        )?)
    }
}

/// A tokenizer for which each byte is a token. `tokenizers` spells bytes as GPT-2 does: bytes that print in Latin-1 as
/// their characters, the others as the characters from 256 on.
fn byte_tokenizer() -> Value {
    let prints = |byte: &u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let codes = (0..256).filter(prints).map(|byte| (byte, byte));
    let codes = codes.chain((0..256).filter(|byte| !prints(byte)).zip(256..));
    let vocabulary: Map<String, Value> =
        codes.map(|(byte, code)| (char::from_u32(code).unwrap_or_default().to_string(), byte.into())).collect();
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": [],
        },
    })
}
