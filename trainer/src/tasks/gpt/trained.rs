//! A trained GPT: of a checkpoint, or of a folder as `transformers` keeps it.

use std::path::Path;

use crate::checkpoint::Loaded;
use crate::checkpoint::command;
use crate::checkpoint::manifest::Entry;
use crate::error::Result;
use crate::model::gpt::pretrained::{CONFIG, Pretrained};
use crate::model::gpt::{Gpt, Size};
use crate::model::{Model, Tensor};

/// A network, and what it has learned.
pub(super) struct Trained {
    pub(super) gpt: Gpt,
    pub(super) parameters: Vec<f32>,
    /// Whether each token is a byte of text.
    pub(super) is_of_bytes: bool,
    /// The step of its checkpoint.
    pub(super) step: u64,
}

impl Trained {
    /// Loads the newest whole checkpoint in a folder, or that of `step`; or a folder with `config.json`.
    pub(super) fn load(dir: &Path, step: Option<u64>) -> Result<Trained> {
        if step.is_none() && dir.join(CONFIG).exists() {
            let found = Pretrained::open(dir)?;
            let (gpt, is_of_bytes) = (Gpt::new(found.size()), found.is_of_bytes());
            return Ok(Trained { gpt, parameters: found.read()?, is_of_bytes, step: 0 });
        }
        Trained::of_checkpoint(dir, step)
    }

    /// The same, of checkpoints alone.
    pub(super) fn of_checkpoint(dir: &Path, step: Option<u64>) -> Result<Trained> {
        let loaded = command::load(dir, step)?;
        let another = || format!("{} holds checkpoints of another model than a GPT", dir.display());
        let (gpt, parameters) = network(&loaded).ok_or_else(another)?;
        let Loaded { manifest, .. } = loaded;
        let is_of_bytes = [" --text (", " (bytes)"].iter().any(|said| manifest.settings.contains(said));
        Ok(Trained { gpt, parameters, is_of_bytes, step: manifest.step })
    }
}

/// The GPT whose state this is, and its parameters.
fn network(loaded: &Loaded) -> Option<(Gpt, Vec<f32>)> {
    let entries = &loaded.manifest.tensors;
    let entry = |name: &str| entries.iter().find(|entry| entry.name == *name);
    let &[vocabulary, width] = &entry("transformer.wte.weight")?.shape[..] else { return None };
    let context = *entry("transformer.wpe.weight")?.shape.first()?;
    let layers = (0..).take_while(|layer| entry(&format!("transformer.h.{layer}.ln_1.weight")).is_some()).count();
    // The shapes do not say it.
    let heads = loaded.manifest.settings.split_once("--heads ")?.1.split(' ').next()?.parse().ok()?;
    let size = Size { vocabulary, context, layers, heads, width };
    let gpt = size.refusal().is_none().then(|| Gpt::new(size))?;
    let mut parameters = Vec::with_capacity(gpt.parameters());
    for Tensor { name, shape, range, .. } in gpt.tensors() {
        let &Entry { shape: ref found, offset, .. } = entry(name)?;
        let first = offset as usize / size_of::<f32>();
        parameters.extend(loaded.state.get(first..first + range.len()).filter(|_| found == shape)?);
    }
    Some((gpt, parameters))
}
