//! GPT-2 as Hugging Face's `transformers` keeps it: a folder with `config.json` and `model.safetensors`.
//!
//! There a weight of a linear layer has a row for each *input* (`Conv1D`), and here one for each output. The square
//! weights have the same shape in both, so a file that mixes them has right shapes and wrong logits. An export
//! therefore notes a few logits, which are computed again when it is loaded.

#![allow(clippy::disallowed_types)] // It reads two files.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use elastic_trainer::{Model, Tensor};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{Decoder, Gpt, Size};
use crate::data::token_file::sampled;

/// The files in such a folder.
pub(crate) const WEIGHTS: &str = "model.safetensors";
/// As above.
pub(crate) const CONFIG: &str = "config.json";

/// What names begin with in files of the whole model, and do not in files of its body.
const PREFIX: &str = "transformer.";
/// The weights that have a row for each input.
const TURNED: [&str; 4] = ["attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"];
/// The head's weights, which are the tokens' embedding.
const HEAD: &str = "lm_head.weight";
/// Masks, which old files hold.
const MASKS: [&str; 2] = [".attn.bias", ".attn.masked_bias"];

/// Most bytes of a safetensors header, as its authors have it.
const LONGEST: u64 = 100_000_000;
/// Numbers of a weight that are read at once.
const CHUNK: usize = 1 << 18;

/// The note of logits among the weights' metadata.
const NOTE: &str = "known_logits";
/// Tokens and logits in it.
const NOTED: usize = 8;
/// How far a logit may be off, as a share of the largest.
const TOLERANCE: f32 = 1e-3;

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[error("cannot load {} as GPT-2: {cause}", path.display())]
pub struct PretrainedError {
    /// The file or folder.
    pub path: PathBuf,
    /// What is wrong.
    pub cause: String,
    /// The system's error, if it is one.
    #[source]
    pub unread: Option<io::Error>,
}

/// A model on disk. Its names and shapes are right.
#[derive(Debug, Clone, PartialEq)]
pub struct Pretrained {
    weights: PathBuf,
    size: Size,
    /// What its tokens are.
    bytes: bool,
    /// Where each tensor lies in the file.
    places: Vec<(Tensor, u64)>,
    head: Option<u64>,
    note: Option<String>,
    length: u64,
    checksum: u32,
}

/// The parts of `config.json` that this program knows; those that it leaves out have GPT-2's values.
#[derive(Debug, Deserialize, Serialize)]
#[serde(default)]
struct Config {
    model_type: String,
    vocab_size: usize,
    n_positions: usize,
    n_embd: usize,
    n_layer: usize,
    n_head: usize,
    n_inner: Option<usize>,
    activation_function: String,
    layer_norm_epsilon: f64,
    scale_attn_weights: bool,
    scale_attn_by_inverse_layer_idx: bool,
    tie_word_embeddings: bool,
    /// This program's own: `bytes` if each token is a byte of text.
    tokens: Option<String>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            model_type: "gpt2".to_owned(),
            vocab_size: 50_257,
            n_positions: 1024,
            n_embd: 768,
            n_layer: 12,
            n_head: 12,
            n_inner: None,
            activation_function: "gelu_new".to_owned(),
            layer_norm_epsilon: 1e-5,
            scale_attn_weights: true,
            scale_attn_by_inverse_layer_idx: false,
            tie_word_embeddings: true,
            tokens: None,
        }
    }
}

impl Config {
    /// The size, if this is a network that this program computes.
    fn size(&self) -> Result<Size, String> {
        let Config { vocab_size, n_positions, n_embd, n_layer, n_head, .. } = *self;
        let plain = Config::default();
        let others = [
            ("model_type", self.model_type != plain.model_type),
            ("n_inner", self.n_inner.is_some_and(|inner| n_embd.checked_mul(4) != Some(inner))),
            ("activation_function", !["gelu_new", "gelu_pytorch_tanh"].contains(&&*self.activation_function)),
            ("layer_norm_epsilon", (self.layer_norm_epsilon - plain.layer_norm_epsilon).abs() > 1e-12),
            ("scale_attn_weights", !self.scale_attn_weights),
            ("scale_attn_by_inverse_layer_idx", self.scale_attn_by_inverse_layer_idx),
            ("tie_word_embeddings", !self.tie_word_embeddings),
        ];
        if let Some((name, _)) = others.into_iter().find(|(_, differs)| *differs) {
            return Err(format!("{CONFIG} has another {name} than GPT-2"));
        }
        let size = Size { vocabulary: vocab_size, context: n_positions, layers: n_layer, heads: n_head, width: n_embd };
        let refused = |said: String| Err(format!("{CONFIG} has a size that cannot be: {}", said.replace("--", "")));
        size.refusal().map_or(Ok(size), refused)
    }
}

impl Pretrained {
    /// Looks at a folder, or at a file of weights beside its `config.json`. The weights are not read yet.
    pub fn open(path: &Path) -> Result<Pretrained, PretrainedError> {
        let refused = |cause| PretrainedError { path: path.to_owned(), cause, unread: None };
        fs::metadata(path).map_err(|error| refused(error.to_string()))?;
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
        let weights = if path.is_dir() { path.join(WEIGHTS) } else { path.to_owned() };
        look(weights, &folder.join(CONFIG)).map_err(refused)
    }

    /// The network's size.
    pub fn size(&self) -> Size {
        self.size
    }

    /// Whether each token is a byte of text.
    pub fn is_of_bytes(&self) -> bool {
        self.bytes
    }

    /// What distinguishes it, in words.
    pub(super) fn identity(&self) -> String {
        let bytes = if self.bytes { " (bytes)" } else { "" };
        format!("--init-from {}-bytes,crc32c:{:08x}{bytes}", self.length, self.checksum)
    }

    /// Reads the parameters, and compares the logits that the file notes.
    pub fn read(&self) -> Result<Vec<f32>, PretrainedError> {
        let refused = |cause| PretrainedError { path: self.weights.clone(), cause, unread: None };
        let gpt = Gpt::new(self.size);
        let mut parameters = vec![0.0; gpt.parameters()];
        self.read_into(&mut parameters).map_err(|error| {
            let refused = refused(error.to_string());
            PretrainedError { unread: Some(error), ..refused }
        })?;
        if let Some(bad) = parameters.iter().position(|number| !number.is_finite()) {
            return Err(refused(format!("parameter {bad} is not finite")));
        }
        if let Some(note) = &self.note {
            check(&gpt, &parameters, note).map_err(refused)?;
        }
        Ok(parameters)
    }

    fn read_into(&self, parameters: &mut [f32]) -> io::Result<()> {
        let file = File::open(&self.weights)?;
        for (Tensor { name, shape, range, .. }, start) in &self.places {
            let into = &mut parameters[range.clone()];
            read(&file, *start, into)?;
            if is_turned(name) {
                turn(into, shape[1], shape[0]);
            }
        }
        let tokens = self.places.iter().find(|(tensor, _)| tensor.name.ends_with("wte.weight"));
        if let (Some(start), Some((Tensor { range, .. }, _))) = (self.head, tokens) {
            let mut head = vec![0.0; range.len()];
            read(&file, start, &mut head)?;
            if head != parameters[range.clone()] {
                return Err(io::Error::other(format!("{HEAD} differs from wte.weight; GPT-2 has one for both")));
            }
        }
        Ok(())
    }
}

fn look(weights: PathBuf, config: &Path) -> Result<Pretrained, String> {
    let advice = "; `elastic-trainer export` makes such a folder of a checkpoint";
    let text = fs::read(config).map_err(|error| format!("{}: {error}{advice}", config.display()))?;
    let config: Config = serde_json::from_slice(&text).map_err(|error| format!("{CONFIG}: {error}"))?;
    let size = config.size()?;
    let unread = |error: io::Error| format!("{}: {error}", weights.display());
    let file = File::open(&weights).map_err(unread)?;
    let length = file.metadata().map_err(unread)?.len();
    let (start, metadata) = header(&file, length)?;
    let note = metadata.metadata().as_ref().and_then(|about| about.get(NOTE).cloned());
    let mut found = metadata.tensors();
    let mut take = |name: &str| found.remove(name).or_else(|| found.remove(name.strip_prefix(PREFIX)?));
    let place = |info: &TensorInfo| start + info.data_offsets.0 as u64;
    let mut places = Vec::new();
    for tensor in Gpt::new(size).tensors() {
        let info = take(&tensor.name).ok_or_else(|| format!("it has no tensor {}", tensor.name))?;
        check_shape(tensor, info)?;
        places.push((tensor.clone(), place(info)));
    }
    let head = take(HEAD).map(place);
    if let Some(more) = found.keys().find(|name| !MASKS.iter().any(|mask| name.ends_with(mask))) {
        return Err(format!("it has a tensor {more}, which GPT-2 has not"));
    }
    let checksum = sampled(length, 1, |place, bytes| file.read_exact_at(bytes, place)).map_err(unread)?;
    let bytes = config.tokens.as_deref() == Some("bytes") && size.vocabulary == 256;
    Ok(Pretrained { weights, size, bytes, places, head, note, length, checksum })
}

/// Where the data begins, and what is in it.
fn header(file: &File, length: u64) -> Result<(u64, Metadata), String> {
    let mut bytes = vec![0; 8];
    file.read_exact_at(&mut bytes, 0).map_err(|_| format!("it is cut short: it has {length} bytes"))?;
    let said = u64::from_le_bytes(bytes[..8].try_into().unwrap_or_default());
    if said > LONGEST.min(length) {
        return Err(format!("it is no safetensors file, or cut short: a header of {said} bytes in {length}"));
    }
    bytes.resize(8 + said as usize, 0);
    file.read_exact_at(&mut bytes[8..], 8).map_err(|error| error.to_string())?;
    let metadata: Metadata = serde_json::from_slice(&bytes[8..]).map_err(|error| error.to_string())?;
    let whole = 8 + said + metadata.data_len() as u64;
    if whole == length { Ok((8 + said, metadata)) } else { Err(format!("it has {length} bytes instead of {whole}")) }
}

/// Whether the file has the weight with a row for each input.
fn is_turned(name: &str) -> bool {
    TURNED.iter().any(|end| name.ends_with(end))
}

fn check_shape(tensor: &Tensor, found: &TensorInfo) -> Result<(), String> {
    let Tensor { name, shape, .. } = tensor;
    if found.dtype != Dtype::F32 {
        return Err(format!(
            "{name} is of {:?} instead of F32; in Python: model.float().save_pretrained(…)",
            found.dtype
        ));
    }
    let mut wanted = shape.clone();
    if is_turned(name) {
        wanted.reverse();
    }
    if found.shape == wanted {
        return Ok(());
    }
    let advice = if found.shape == *shape { "; a weight has a row for each input here" } else { "" };
    Err(format!("{name} has shape {:?} instead of {wanted:?}{advice}", found.shape))
}

fn read(file: &File, start: u64, into: &mut [f32]) -> io::Result<()> {
    for (chunk, place) in into.chunks_mut(CHUNK).zip((start..).step_by(CHUNK * size_of::<f32>())) {
        file.read_exact_at(bytemuck::cast_slice_mut(chunk), place)?;
    }
    Ok(())
}

/// Transposes a matrix of so many rows and columns.
fn turn(matrix: &mut [f32], rows: usize, columns: usize) {
    let turned: Vec<f32> =
        (0..columns).flat_map(|c| (0..rows).map(move |r| r * columns + c)).map(|i| matrix[i]).collect();
    matrix.copy_from_slice(&turned);
}

/// Logits of some tokens, spread over the vocabulary, after as many that are spread over it too.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    tokens: Vec<u32>,
    classes: Vec<usize>,
    logits: Vec<f32>,
}

impl Note {
    fn of(gpt: &Gpt, parameters: &[f32]) -> Note {
        let Size { vocabulary, context, .. } = gpt.size();
        let tokens =
            (0..NOTED.min(context)).map(|n| (7 * n + 1) * vocabulary / (7 * NOTED + 1)).map(|n| n as u32).collect();
        let classes: Vec<usize> = (0..NOTED).map(|n| n * vocabulary / NOTED).collect();
        let mut note = Note { tokens, classes, logits: Vec::new() };
        note.logits = note.compute(gpt, parameters);
        note
    }

    fn compute(&self, gpt: &Gpt, parameters: &[f32]) -> Vec<f32> {
        let mut decoder = Decoder::new(gpt, parameters);
        let Some((last, before)) = self.tokens.split_last() else { return Vec::new() };
        before.iter().for_each(|token| _ = decoder.push(*token));
        let logits = decoder.push(*last);
        self.classes.iter().map(|class| logits[*class]).collect()
    }
}

/// Fails if the logits are not those that the file notes.
fn check(gpt: &Gpt, parameters: &[f32], note: &str) -> Result<(), String> {
    let note: Note = serde_json::from_str(note).map_err(|error| format!("its {NOTE}: {error}"))?;
    let Size { vocabulary, context, .. } = gpt.size();
    let known = note.tokens.iter().all(|token| (*token as usize) < vocabulary) && note.tokens.len() <= context;
    if !known || note.classes.iter().any(|class| *class >= vocabulary) {
        return Err(format!("its {NOTE} are another model's"));
    }
    let found = note.compute(gpt, parameters);
    let most = note.logits.iter().fold(0.0f32, |most, logit| most.max(logit.abs()));
    for (found, noted) in found.iter().zip(&note.logits) {
        if (found - noted).abs() > TOLERANCE * most {
            return Err(format!(
                "a logit is {found} where the file notes {noted}: its numbers were changed, or a square weight is \
                 transposed; export it again"
            ));
        }
    }
    Ok(())
}

/// The contents of `config.json` and `model.safetensors`.
pub(crate) fn contents(gpt: &Gpt, parameters: &[f32], is_of_bytes: bool, step: u64) -> (Vec<u8>, Vec<u8>) {
    let note = serde_json::to_string(&Note::of(gpt, parameters)).unwrap_or_default();
    let about = json!({"format": "pt", "step": step.to_string(), NOTE: note});
    let (mut header, mut data) = (Map::from_iter([("__metadata__".to_owned(), about)]), Vec::new());
    for Tensor { name, shape, range, .. } in gpt.tensors() {
        let (mut numbers, mut shape) = (parameters[range.clone()].to_vec(), shape.clone());
        if is_turned(name) {
            turn(&mut numbers, shape[0], shape[1]);
            shape.reverse();
        }
        let bytes: &[u8] = bytemuck::cast_slice(&numbers);
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.clone(), json!({"dtype": "F32", "shape": shape, "data_offsets": offsets}));
        data.extend_from_slice(bytes);
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');
    let weights = [&(header.len() as u64).to_le_bytes(), &header[..], &data].concat();
    (config(gpt.size(), is_of_bytes), weights)
}

fn config(size: Size, is_of_bytes: bool) -> Vec<u8> {
    let Size { vocabulary, context, layers, heads, width } = size;
    let tokens = is_of_bytes.then(|| "bytes".to_owned());
    let own = Config {
        vocab_size: vocabulary,
        n_positions: context,
        n_embd: width,
        n_layer: layers,
        n_head: heads,
        tokens,
        ..Config::default()
    };
    let mut config = serde_json::to_value(own).unwrap_or_default();
    // GPT-2's last token ends a text. Nothing was dropped in training.
    let end = (vocabulary >= Size::GPT2.vocabulary).then_some(Size::GPT2.vocabulary - 1);
    let rest = json!({
        "architectures": ["GPT2LMHeadModel"], "dtype": "float32", "bos_token_id": end, "eos_token_id": end,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    });
    if let (Value::Object(config), Value::Object(rest)) = (&mut config, rest) {
        config.extend(rest);
    }
    serde_json::to_vec_pretty(&config).unwrap_or_default()
}
