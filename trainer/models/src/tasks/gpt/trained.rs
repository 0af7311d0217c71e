//! A trained GPT: of a checkpoint, or of a folder as `transformers` keeps it.

use std::path::Path;

use elastic_trainer::{Loaded, Model, Result, Tensor};

use crate::gpt::pretrained::{CONFIG, Pretrained};
use crate::gpt::{Gpt, Size};

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
        let loaded = Loaded::from_folder(dir, step)?;
        let another = || format!("{} holds checkpoints of another model than a GPT", dir.display());
        let (gpt, parameters) = network(&loaded).ok_or_else(another)?;
        let is_of_bytes = [" --text (", " (bytes)"].iter().any(|said| loaded.settings().contains(said));
        Ok(Trained { gpt, parameters, is_of_bytes, step: loaded.step() })
    }
}

/// The GPT whose state this is, and its parameters.
fn network(loaded: &Loaded) -> Option<(Gpt, Vec<f32>)> {
    let &[vocabulary, width] = loaded.tensor("transformer.wte.weight")?.0 else { return None };
    let context = *loaded.tensor("transformer.wpe.weight")?.0.first()?;
    let has = |layer: &usize| loaded.tensor(&format!("transformer.h.{layer}.ln_1.weight")).is_some();
    let layers = (0..).take_while(has).count();
    // The shapes do not say it.
    let heads = loaded.settings().split_once("--heads ")?.1.split(' ').next()?.parse().ok()?;
    let size = Size { vocabulary, context, layers, heads, width };
    let gpt = size.refusal().is_none().then(|| Gpt::new(size))?;
    let mut parameters = Vec::with_capacity(gpt.parameters());
    for Tensor { name, shape, range, .. } in gpt.tensors() {
        let (found, numbers) = loaded.tensor(name)?;
        parameters.extend((found == shape && numbers.len() == range.len()).then_some(numbers)?);
    }
    Some((gpt, parameters))
}
