//! What a rank's memory is for, as far as the trainer knows it before it begins.

use std::ops::Range;

use crate::checkpoint::command::bytes;
use crate::engine::owners::{Cut, Share};
use crate::model::Model;
use crate::settings::Settings;

/// Bytes by part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Memory {
    parameters: u64,
    /// Those that are added, in all threads, if this rank computes all shards.
    gradients: u64,
    /// What the optimizer keeps.
    optimizer: u64,
    /// What a pass keeps, in all threads.
    activations: Option<u64>,
    /// Two copies of the state: the node's, or rank 0's own.
    snapshots: u64,
}

impl Memory {
    /// Of a rank that trains this model.
    pub(super) fn of<M: Model>(
        model: &M,
        settings: &Settings,
        samples: u64,
        (has_agent, world_size): (bool, u32),
    ) -> Memory {
        let parameters = (model.parameters() * size_of::<f32>()) as u64;
        let kinds = settings.optimizer().kept().len() as u64;
        let owned = Cut::of(settings, model.parameters()).map_or(parameters, |cut| {
            let owned = cut.owned(&[Share { world_size, rank: 0 }]);
            (owned.iter().map(Range::len).sum::<usize>() * size_of::<f32>()) as u64
        });
        let optimizer = kinds * owned;
        let (shards, threads) = (u64::from(settings.shards.get()), settings.threads.get() as u64);
        // A thread keeps a sum for each level of its part of the tree. Threads beyond the shards compute no gradient.
        let threads = threads.min(shards);
        let levels = u64::from(shards.div_ceil(threads).next_power_of_two().ilog2()) + 1;
        let cut = u64::from(settings.micro_batch.is_some());
        let gradients = (threads * (levels + cut) + 1) * parameters;
        let shard = settings.batch.get().min(samples).div_ceil(shards) as usize;
        let samples = settings.micro_batch.map_or(shard, |most| shard.min(most.get()));
        let activations = model.activation_bytes(samples).map(|bytes| bytes * threads);
        let snapshots = if has_agent && settings.snapshot_every > 0 || settings.checkpoint_dir.is_some() {
            2 * (1 + kinds) * parameters
        } else {
            0
        };
        Memory { parameters, gradients, optimizer, activations, snapshots }
    }

    /// A line for people.
    pub(super) fn line(&self) -> String {
        let Memory { parameters, gradients, optimizer, activations, snapshots } = *self;
        let mut parts = vec![("parameters", parameters), ("gradients up to", gradients), ("optimizer", optimizer)];
        parts.extend(activations.map(|bytes| ("activations about", bytes)));
        if snapshots > 0 {
            parts.push(("snapshots", snapshots));
        }
        let parts: Vec<String> = parts.into_iter().map(|(part, count)| format!("{part} {}", bytes(count))).collect();
        format!("memory of a rank: {}", parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Tensor;
    use crate::model::tests::Plain;
    use crate::settings::OptimizerState;

    #[test]
    fn a_ranks_memory_is_printed_by_part() {
        let mut settings = Settings { snapshot_every: 10, ..Settings::default() };
        let model = |count, bytes| Plain(Tensor::sequence([("all", vec![count])]), bytes);
        let line = Memory::of(&model(7510, None), &settings, 100, (false, 1)).line();
        assert_eq!(line, "memory of a rank: parameters 30.0 kB, gradients up to 150.2 kB, optimizer 60.1 kB");
        let gpt2 = model(124_439_808, Some(675_000_000));
        // Of eight ranks that shard it, each has a quarter of AdamW's numbers.
        settings.optimizer_state = OptimizerState::Sharded;
        for (ranks, optimizer) in [(1, "995.5 MB"), (2, "995.5 MB"), (4, "497.8 MB"), (8, "248.9 MB")] {
            let line = Memory::of(&gpt2, &settings, 100, (false, ranks)).line();
            assert!(line.contains(&format!("optimizer {optimizer}")), "{ranks} ranks: {line}");
        }
        settings.optimizer_state = OptimizerState::Whole;
        // Two threads with 2 of the 8 samples of a shard, as GPT-2 has them.
        settings.micro_batch = 2.try_into().ok();
        settings.threads = 2.try_into().unwrap();
        let line = Memory::of(&gpt2, &settings, 100, (true, 1)).line();
        let wanted = "memory of a rank: parameters 497.8 MB, gradients up to 4.5 GB, optimizer 995.5 MB, activations about 2.7 GB, \
            snapshots 3.0 GB";
        assert_eq!(line, wanted);
    }
}
