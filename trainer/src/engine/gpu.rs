//! Steps on a GPU: parameters, the optimizer's state and the gradients of shards stay there, and so do sums over ranks
//! where these have NCCL. Else a rank's partial sums come to the host for the sum over TCP.

use cudarc::driver::CudaSlice;

use super::nccl::{Nccl, NoNccl};
use super::{Engine, EngineError, Ranks, Reduced, Step};
use crate::collective::tree::Node;
use crate::collective::{Group, SumOrder};
use crate::cuda::{CudaError, Gpu, GpuState, Graphs, HostCopy, HostMemory, Pass, Room};
use crate::gradient::Task;
use crate::model::Model;
use crate::model::clip::bounded;
use crate::state::State;

/// It works on its own copy of the state.
pub(super) struct OnGpu<'a, M: Model> {
    /// Dropped before the memory that it works on.
    nccl: Nccl,
    gpu: Gpu,
    pass: Box<dyn Pass<M::Batch> + 'a>,
    graphs: Graphs,
    state: GpuState,
    /// Whether the loop's numbers are older.
    ahead: bool,
    batch: M::Batch,
    samples: Vec<u64>,
    /// Gradients that nobody uses.
    spare: Vec<CudaSlice<f32>>,
    /// What is summed over NCCL, and the sum over all ranks.
    sums: Vec<CudaSlice<f32>>,
    sum: CudaSlice<f32>,
    /// The same on the host, for TCP: the first becomes the sum.
    partials: Vec<HostMemory>,
    order: SumOrder,
    norm: Room<f64>,
}

impl<'a, M: Model> OnGpu<'a, M> {
    pub(super) fn new(
        gpu: Gpu,
        pass: Box<dyn Pass<M::Batch> + 'a>,
        nccl: Nccl,
        count: usize,
        order: SumOrder,
    ) -> Result<OnGpu<'a, M>, CudaError> {
        let state = GpuState::new(&gpu, count)?;
        let sum = gpu.zeros(count + 1)?;
        let (graphs, batch, samples, spare, sums) = Default::default();
        let (partials, norm) = Default::default();
        Ok(OnGpu {
            nccl,
            gpu,
            pass,
            graphs,
            state,
            ahead: false,
            batch,
            samples,
            spare,
            sums,
            sum,
            partials,
            order,
            norm,
        })
    }

    /// Sums over ranks on GPUs.
    fn sum_over_nccl(&mut self, task: &Task<'_, M>, ranks: Ranks<'_>) -> Result<u32, EngineError> {
        let Ranks { group, nodes, vote } = ranks;
        // Those of a sum that was given up.
        self.spare.append(&mut self.sums);
        for &node in nodes {
            let sum = self.sum_under(task, node)?;
            self.sums.push(sum);
        }
        let OnGpu { nccl, gpu, sums, sum, order, .. } = self;
        match order {
            SumOrder::Fixed => nccl.make_room(gpu, group, task.shards, sum.len())?,
            SumOrder::Any => {
                match sums.first() {
                    Some(first) => gpu.copy(&first.as_view(), &mut sum.as_view_mut())?,
                    None => gpu.clear(sum)?,
                }
                sums.iter().skip(1).try_for_each(|more| gpu.add(sum, more))?;
            }
        }
        // What goes wrong in a gradient is no fault of NCCL's, and nobody's time for the sum runs while another computes.
        gpu.wait()?;
        let votes = nccl.exchange(group, vote())?;
        match order {
            SumOrder::Fixed => nccl.sum(gpu, group, task.shards, sums, sum)?,
            SumOrder::Any => nccl.sum_in_any_order(gpu, group, sum)?,
        }
        Ok(votes)
    }

    /// Sums over ranks on hosts.
    fn sum_over_tcp(&mut self, task: &Task<'_, M>, ranks: Ranks<'_>) -> Result<u32, EngineError> {
        let Ranks { group, nodes, vote } = ranks;
        self.partials.resize_with(nodes.len().max(1), || self.gpu.host_memory(self.sum.len()));
        for (number, &node) in nodes.iter().enumerate() {
            let sum = self.sum_under(task, node)?;
            self.gpu.download(&sum.as_view(), &mut self.partials[number])?;
            self.spare.push(sum);
        }
        let [first, rest @ ..] = &mut self.partials[..] else { unreachable!("one at least") };
        let rest: Vec<&[f32]> = rest.iter().map(|partial| &partial[..]).collect();
        let votes = group.sum(self.order, task.shards, &rest, first, Some(vote()))?;
        self.gpu.upload(&first[..], &mut self.sum.as_view_mut())?;
        // The GPU may still read what the next step overwrites.
        self.gpu.wait()?;
        Ok(votes)
    }

    /// The sum of all shards, which are this rank's.
    fn sum_alone(&mut self, task: &Task<'_, M>, ranks: Ranks<'_>) -> Result<u32, EngineError> {
        let sum = self.sum_under(task, Node::root(task.shards))?;
        self.gpu.copy(&sum.as_view(), &mut self.sum.as_view_mut())?;
        self.spare.push(sum);
        Ok((ranks.vote)())
    }

    /// As [`Task::sum_under`], in the same order.
    fn sum_under(&mut self, task: &Task<'_, M>, node: Node) -> Result<CudaSlice<f32>, CudaError> {
        let Some((left, right)) = node.children() else { return self.leaf(task, node.first) };
        let mut sum = self.sum_under(task, left)?;
        let more = self.sum_under(task, right)?;
        self.gpu.add(&mut sum, &more)?;
        self.spare.push(more);
        Ok(sum)
    }

    fn leaf(&mut self, task: &Task<'_, M>, shard: u32) -> Result<CudaSlice<f32>, CudaError> {
        let mut samples = std::mem::take(&mut self.samples);
        task.samples_of(shard, &mut samples);
        let mut pieces = samples.chunks(task.largest_piece());
        let gradient = match pieces.next() {
            None => {
                let mut gradient = self.room()?;
                self.gpu.clear(&mut gradient)?;
                gradient
            }
            Some(piece) => {
                let mut gradient = self.piece(task, piece)?;
                for piece in pieces {
                    let more = self.piece(task, piece)?;
                    self.gpu.add(&mut gradient, &more)?;
                    self.spare.push(more);
                }
                gradient
            }
        };
        self.samples = samples;
        Ok(gradient)
    }

    fn piece(&mut self, task: &Task<'_, M>, samples: &[u64]) -> Result<CudaSlice<f32>, CudaError> {
        let mut gradient = self.room()?;
        task.data.read(samples, &mut self.batch);
        let OnGpu { gpu, pass, graphs, state, batch, .. } = self;
        let [parameters, ..] = state.parts();
        let shape = pass.load(gpu, batch)?;
        let key = (shape, gpu.address(&gradient));
        graphs.run(gpu, key, || pass.gradient(gpu, parameters, &mut gradient))?;
        Ok(gradient)
    }

    /// For a gradient and its loss.
    fn room(&mut self) -> Result<CudaSlice<f32>, CudaError> {
        self.spare.pop().map_or_else(|| self.gpu.zeros(self.sum.len()), Ok)
    }
}

impl<M: Model> Engine<M> for OnGpu<'_, M> {
    fn kind(&self) -> Option<String> {
        Some(format!("(on a GPU: {})", self.gpu.kind()))
    }

    fn take(&mut self, state: &State) -> Result<(), CudaError> {
        self.state.upload(&self.gpu, &state.flat)?;
        self.ahead = false;
        Ok(())
    }

    fn nccl(&self) -> Result<(), &NoNccl> {
        self.nccl.usable()
    }

    fn join(&mut self, group: &mut Group) -> Result<(), EngineError> {
        self.nccl.join(group)
    }

    fn leave(&mut self, group: &mut Group) -> Result<(), EngineError> {
        if self.nccl.is_joined() {
            self.nccl.exchange(group, 0)?;
        }
        Ok(())
    }

    fn reduce(&mut self, task: &Task<'_, M>, ranks: Ranks<'_>) -> Result<Reduced, EngineError> {
        let votes = match ranks.group.world_size() {
            1 => self.sum_alone(task, ranks)?,
            _ if self.nccl.is_joined() => self.sum_over_nccl(task, ranks)?,
            _ => self.sum_over_tcp(task, ranks)?,
        };
        let mut loss = [0.0];
        self.gpu.download(&self.sum.slice(self.sum.len() - 1..), &mut loss)?;
        Ok(Reduced { loss: loss[0], votes })
    }

    fn advance(&mut self, state: &mut State, step: &Step<'_>) -> Result<(), CudaError> {
        let &Step { ref rule, tensors, scale, clip } = step;
        let scale = match clip {
            None => scale,
            Some(most) => {
                let norm = self.gpu.norm(&self.sum.slice(..self.sum.len() - 1), &mut self.norm)?;
                bounded(norm, scale, most)
            }
        };
        self.ahead = true;
        state.step += 1;
        self.gpu.adamw(rule, state.step, tensors, self.state.parts_mut(&self.gpu)?, &self.sum, scale)
    }

    fn give(&mut self, state: &mut State) -> Result<(), CudaError> {
        if std::mem::take(&mut self.ahead) {
            self.state.download(&self.gpu, &mut state.flat)?;
        }
        Ok(())
    }

    fn snapshot(&mut self, state: &mut State) -> Result<Option<HostCopy>, CudaError> {
        let copy = self.state.snapshot(&self.gpu)?;
        if copy.is_none() {
            self.give(state)?;
        }
        Ok(copy)
    }
}
