//! Steps on this machine's CPUs, on as many threads as are asked for. Not for GPUs.

use super::{Engine, Step};
use crate::collective::tree::Node;
use crate::cuda::CudaError;
use crate::gradient::{Desk, Task};
use crate::model::Model;
use crate::model::clip::clipped;
use crate::state::State;

/// It works on the loop's state.
pub(super) struct OnHost<M: Model> {
    desks: Vec<Desk<M::Batch>>,
    sums: Vec<Vec<f32>>,
}

impl<M: Model> OnHost<M> {
    pub(super) fn new(threads: usize) -> OnHost<M> {
        OnHost { desks: (0..threads).map(|_| Desk::default()).collect(), sums: Vec::new() }
    }
}

impl<M: Model> Engine<M> for OnHost<M> {
    fn kind(&self) -> Option<String> {
        None
    }

    fn take(&mut self, _: &State) -> Result<(), CudaError> {
        Ok(())
    }

    fn sums(&mut self, task: &Task<'_, M>, nodes: &[Node]) -> Result<&[Vec<f32>], CudaError> {
        self.sums.drain(..).for_each(|sum| self.desks[0].recycle(sum));
        self.sums.extend(nodes.iter().map(|&node| task.sum_under(node, &mut self.desks)));
        Ok(&self.sums)
    }

    fn advance(&mut self, state: &mut State, step: &Step<'_>) -> Result<(), CudaError> {
        let &Step { ref rule, tensors, sum, scale, clip } = step;
        let gradient = &sum[..sum.len() - 1];
        let scale = clip.map_or(scale, |most| clipped(gradient, scale, most));
        state.advance(rule, tensors, gradient, scale);
        Ok(())
    }

    fn give(&mut self, _: &mut State) -> Result<(), CudaError> {
        Ok(())
    }
}
