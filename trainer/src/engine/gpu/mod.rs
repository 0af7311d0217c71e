//! Steps on a GPU: parameters, the optimizer's state and the gradients of shards stay there, and so do sums over ranks
//! where these have NCCL. Else a rank's partial sums come to the host for the sum over TCP.

mod overlap;

use std::ops::Range;

use elastic_collective::Group;
use elastic_collective::tree::Node;
use elastic_cuda::{
    Buffer, CudaError, CudaSlice, Decays, Done, Gpu, GpuState, Graphs, HostCopy, HostMemory, Mark, Pass,
};
use tracing::info;

use super::gradient::GradientTask;
use super::nccl::Nccl;
use super::state::State;
use super::{Advance, DeviceError, Engine, EngineError, Evaluated, Ranks, Reduced, Transport};
use crate::model::clip::bounded;
use crate::model::{AdamW, Model, Optimizer, ParameterGroup, Rule, Tensor};
use crate::settings::device::{Device, Precision};
use crate::settings::{Environment, OptimizerState, Settings};
use crate::vectors::first_not_finite;
use overlap::Bucket;

/// A GPU hangs where it is at one piece of work for as many times as long as peers are waited for.
const HANGS: u32 = 20;

/// The engine on the GPU that the settings ask for.
pub(super) fn open<'a, M: Model>(
    settings: &Settings,
    environment: &Environment,
    model: &'a M,
) -> Result<Box<dyn Engine<M> + 'a>, DeviceError> {
    let pass = model.on_gpu()?;
    let gpus = Gpu::count(&environment.cuda);
    let is_meant = settings.device != Device::Auto || gpus.as_ref().is_ok_and(|count| *count > 0);
    if settings.optimizer_state == OptimizerState::Sharded && is_meant {
        return Err(DeviceError::WholeAlone);
    }
    let decaying = decaying(&settings.optimizer(), model.tensors()).map_err(DeviceError::ByAdamWAlone)?;
    let number = settings.device.gpu(environment.device_rank, gpus?).unwrap_or_default();
    let precision = match settings.precision {
        Precision::F32 => elastic_cuda::Precision::F32,
        Precision::Bf16 => elastic_cuda::Precision::Bf16,
    };
    let gpu = Gpu::open(&environment.cuda, number)?.multiplying_in(precision);
    let gpu = gpu.patient_for(settings.peer_timeout.saturating_mul(HANGS));
    info!("computes on GPU {number}, {}: {}", gpu.name(), gpu.versions());
    let nccl = Nccl::load(&gpu, settings, environment);
    let decays = Decays::new(&gpu, decaying)?;
    Ok(Box::new(OnGpu::new(gpu, pass, nccl, settings, decays, model)?))
}

/// The tensors' places, and whether each decays; or what a GPU cannot do.
fn decaying(optimizer: &Optimizer, tensors: &[Tensor]) -> Result<Vec<(Range<usize>, bool)>, String> {
    adamw(optimizer)?;
    let decays = |tensor: &Tensor| match tensor.rule {
        Rule::Optimize { group: ParameterGroup::DECAYED } => Ok((tensor.range.clone(), true)),
        Rule::Optimize { group: ParameterGroup::PLAIN } => Ok((tensor.range.clone(), false)),
        _ => Err(format!("tensor {} has a rule of its own", tensor.name)),
    };
    tensors.iter().map(decays).collect()
}

fn adamw(optimizer: &Optimizer) -> Result<&AdamW, String> {
    match optimizer {
        Optimizer::AdamW(rule) => Ok(rule),
        Optimizer::Sgd(_) => Err("--optimizer is sgd".to_owned()),
    }
}

/// It works on its own copy of the state.
struct OnGpu<'a, M: Model> {
    /// Dropped before the memory that it works on.
    nccl: Nccl,
    gpu: Gpu,
    passes: Passes<'a, M>,
    state: GpuState,
    decays: Decays,
    /// Whether the loop's numbers are older.
    ahead: bool,
    samples: Vec<u64>,
    /// Gradients that are not in use.
    spare: Vec<CudaSlice<f32>>,
    /// What is summed over NCCL, and the sum over all ranks.
    sums: Vec<CudaSlice<f32>>,
    sum: CudaSlice<f32>,
    /// How NCCL sums it: the end first.
    buckets: Vec<Bucket>,
    /// The same on the host, for TCP: the first becomes the sum.
    partials: Vec<HostMemory>,
    norm: Buffer<f64>,
    bits: Buffer<u64>,
}

/// What computes gradients.
struct Passes<'a, M: Model> {
    pass: Box<dyn Pass<M::Batch> + 'a>,
    graphs: Graphs,
    batch: M::Batch,
    /// The ends of the last pieces. The host is at most two pieces ahead of the GPU, so that little is left to compute
    /// when a step is given up.
    ends: [Mark; 2],
}

impl<'a, M: Model> OnGpu<'a, M> {
    fn new(
        gpu: Gpu,
        pass: Box<dyn Pass<M::Batch> + 'a>,
        nccl: Nccl,
        settings: &Settings,
        decays: Decays,
        model: &M,
    ) -> Result<OnGpu<'a, M>, CudaError> {
        let count = model.parameters();
        let state = GpuState::new(&gpu, count)?;
        let sum = gpu.zeros(count + 1)?;
        let buckets = match nccl.usable() {
            Ok(()) => overlap::cut(&gpu, sum.len(), settings.bucket())?,
            Err(_) => Vec::new(),
        };
        let (graphs, batch) = (Graphs::default(), M::Batch::default());
        let (samples, spare, sums, partials, norm, bits) = Default::default();
        let passes = Passes { pass, graphs, batch, ends: gpu.marks_of_ends()? };
        Ok(OnGpu {
            nccl,
            gpu,
            passes,
            state,
            decays,
            ahead: false,
            samples,
            spare,
            sums,
            sum,
            buckets,
            partials,
            norm,
            bits,
        })
    }

    /// Sums over ranks on hosts.
    fn sum_over_tcp(&mut self, task: &GradientTask<'_, M>, ranks: Ranks<'_>) -> Result<u32, EngineError> {
        let Ranks { group, nodes, vote } = ranks;
        self.partials.resize_with(nodes.len().max(1), || self.gpu.host_memory(self.sum.len()));
        for (number, &node) in nodes.iter().enumerate() {
            let sum = self.sum_under(task, node)?;
            self.gpu.download(&sum.as_view(), &mut self.partials[number])?;
            self.spare.push(sum);
        }
        let [first, rest @ ..] = &mut self.partials[..] else { unreachable!("one at least") };
        let rest: Vec<&[f32]> = rest.iter().map(|partial| &partial[..]).collect();
        let votes = group.ordered_sum(task.shards, &rest, first, vote())?;
        self.gpu.upload(&first[..], &mut self.sum.as_view_mut())?;
        // The GPU may still read what the next step overwrites.
        self.gpu.wait()?;
        Ok(votes)
    }

    /// The sum of all shards, which are this rank's.
    fn sum_alone(&mut self, task: &GradientTask<'_, M>, ranks: Ranks<'_>) -> Result<u32, EngineError> {
        let sum = self.sum_under(task, Node::root(task.shards))?;
        self.gpu.copy(&sum.as_view(), &mut self.sum.as_view_mut())?;
        self.spare.push(sum);
        Ok((ranks.vote)())
    }

    /// As [`GradientTask::sum_under`].
    fn sum_under(&mut self, task: &GradientTask<'_, M>, node: Node) -> Result<CudaSlice<f32>, EngineError> {
        let take = |engine: &mut Self, shard: Node| engine.leaf(task, shard.first);
        let add = |engine: &mut Self, mut sum: CudaSlice<f32>, more: CudaSlice<f32>| {
            engine.gpu.add(&mut sum, &more)?;
            engine.spare.push(more);
            Ok(sum)
        };
        node.sum(self, &|_| false, &take, &add)
    }

    fn leaf(&mut self, task: &GradientTask<'_, M>, shard: u32) -> Result<CudaSlice<f32>, EngineError> {
        let mut samples = std::mem::take(&mut self.samples);
        task.samples_of(shard, &mut samples);
        let gradient = self.sum_of(task, &samples)?;
        self.samples = samples;
        Ok(gradient)
    }

    /// The sum of samples that are computed a piece at a time.
    fn sum_of(&mut self, task: &GradientTask<'_, M>, samples: &[u64]) -> Result<CudaSlice<f32>, EngineError> {
        let mut sum = self.room()?;
        if samples.is_empty() {
            self.gpu.clear(&mut sum)?;
        }
        for (number, piece) in samples.chunks(task.largest_piece()).enumerate() {
            let mut more = if number == 0 { None } else { Some(self.room()?) };
            let OnGpu { gpu, passes, state, .. } = self;
            let [parameters, ..] = state.parts();
            passes.run(gpu, parameters, (task, piece), more.as_mut().unwrap_or(&mut sum), None)?;
            if let Some(more) = more {
                gpu.add(&mut sum, &more)?;
                self.spare.push(more);
            }
        }
        Ok(sum)
    }

    /// The summed loss of the shards under `node`.
    fn loss_under(&mut self, task: &GradientTask<'_, M>, node: Node) -> Result<[f32; 1], EngineError> {
        let take = |engine: &mut Self, shard: Node| {
            let sum = engine.leaf(task, shard.first)?;
            let mut loss = [0.0];
            engine.gpu.download(&sum.slice(sum.len() - 1..), &mut loss)?;
            engine.spare.push(sum);
            Ok::<[f32; 1], EngineError>(loss)
        };
        node.sum(self, &|_| false, &take, &|_: &mut Self, [left]: [f32; 1], [right]: [f32; 1]| Ok([left + right]))
    }

    /// For a gradient and its loss.
    fn room(&mut self) -> Result<CudaSlice<f32>, CudaError> {
        self.spare.pop().map_or_else(|| self.gpu.zeros(self.sum.len()), Ok)
    }
}

impl<M: Model> Drop for OnGpu<'_, M> {
    fn drop(&mut self) {
        // A sum that failed may have left it at a gradient, by graphs and buffers that end now. One that cannot compute
        // is at nothing.
        let _ = self.gpu.wait();
    }
}

impl<M: Model> Passes<'_, M> {
    /// Has the GPU write the gradient and the loss of samples that are computed at once. The callback learns how much
    /// of it is final, each time that one more bucket of so many numbers is.
    fn run(
        &mut self,
        gpu: &Gpu,
        parameters: &CudaSlice<f32>,
        (task, samples): (&GradientTask<'_, M>, &[u64]),
        gradient: &mut CudaSlice<f32>,
        told: Option<(usize, &mut Done<'_>)>,
    ) -> Result<(), EngineError> {
        let Passes { pass, graphs, batch, ends } = self;
        gpu.wait_for(&ends[0])?;
        ends.rotate_left(1);
        if task.interruption.is_due() {
            task.interruption.result()?;
        }
        let left = task.feed.take(&task.piece_of(samples), batch, task.interruption)?;
        let Some(left) = left else { return task.interruption.result() };
        if left.is_empty() {
            return Ok(gpu.clear(gradient)?);
        }
        let shape = pass.load(gpu, batch)?;
        let (bucket, done) = told.map_or((usize::MAX, None), |(bucket, done)| (bucket, Some(done)));
        let launches = |gradient: &mut CudaSlice<f32>, done: &mut Done<'_>| {
            let mut full = 0;
            pass.gradient(gpu, parameters, gradient, &mut |end| {
                let now = end.len() / bucket;
                if std::mem::replace(&mut full, now) == now { Ok(()) } else { done(end) }
            })
        };
        graphs.run(gpu, shape, gradient, launches, done)?;
        gpu.set(&ends[1])?;
        // The GPU is at it now.
        task.feed.help(|next| pass.prepare(next));
        Ok(())
    }
}

impl<M: Model> Engine<M> for OnGpu<'_, M> {
    fn kind(&self) -> Option<String> {
        Some(format!("(on a GPU: {})", self.gpu.kind()))
    }

    fn take(&mut self, state: &State) -> Result<(), EngineError> {
        self.state.upload(&self.gpu, &state.flat)?;
        self.ahead = false;
        Ok(())
    }

    fn nccl(&self) -> Result<(), String> {
        self.nccl.usable().map_err(ToString::to_string)
    }

    fn transport(&self) -> Transport {
        let name = if self.nccl.is_joined() { "nccl" } else { "tcp" };
        Transport { name, nccl_failures: self.nccl.failures() }
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

    fn reduce(&mut self, task: &GradientTask<'_, M>, ranks: Ranks<'_>) -> Result<Reduced, EngineError> {
        let alone = [Node::root(task.shards)];
        let is_alone = ranks.group.world_size() == 1;
        task.begin(if is_alone { &alone } else { ranks.nodes }, 1, true);
        let votes = match ranks.group.world_size() {
            1 => self.sum_alone(task, ranks)?,
            _ if self.nccl.is_joined() => self.sum_over_nccl(task, ranks)?,
            _ => self.sum_over_tcp(task, ranks)?,
        };
        let mut loss = [0.0];
        self.gpu.download(&self.sum.slice(self.sum.len() - 1..), &mut loss)?;
        Ok(Reduced { loss: loss[0], votes })
    }

    /// A GPU has a pass for gradients alone: the loss is what is kept of it.
    fn evaluate(&mut self, task: &GradientTask<'_, M>, ranks: Ranks<'_>) -> Result<Evaluated, EngineError> {
        let Ranks { group, nodes, vote } = ranks;
        task.begin(nodes, 1, true);
        let parts = nodes.iter().map(|&node| self.loss_under(task, node)).collect::<Result<Vec<_>, _>>()?;
        let mut parts = parts.into_iter();
        let mut sums = parts.next().unwrap_or_default();
        let mut votes = vote();
        if group.world_size() > 1 {
            let rest: Vec<&[f32]> = parts.as_slice().iter().map(|part| &part[..]).collect();
            votes = group.ordered_sum(task.shards, &rest, &mut sums, votes)?;
        }
        Ok(Evaluated { sums: sums.to_vec(), votes })
    }

    fn advance(&mut self, state: &mut State, along: &Advance<'_>) -> Result<(), EngineError> {
        let &Advance { optimizer, tensors, mean, clip, .. } = along;
        let gradient = self.sum.slice(..self.sum.len() - 1);
        let norm = self.gpu.norm(&gradient, &mut self.norm)?;
        if !norm.is_finite() {
            let mut numbers = vec![0.0; gradient.len()];
            self.gpu.download(&gradient, &mut numbers)?;
            let tensor = Tensor::name_at(tensors, first_not_finite(&numbers).unwrap_or_default());
            return Err(EngineError::NotFinite { step: state.step + 1, tensor });
        }
        let stride = along.stride(state.step, clip.map_or(mean, |most| bounded(norm, mean, most)));
        self.ahead = true;
        state.flat = Vec::new();
        state.step += 1;
        let moved = self.state.parts_mut(&self.gpu)?;
        let Ok(rule) = adamw(optimizer) else { unreachable!("no GPU was opened for another optimizer") };
        Ok(rule.step_on_gpu(&self.gpu, &stride, &self.decays, moved, &self.sum)?)
    }

    fn give(&mut self, state: &mut State) -> Result<(), EngineError> {
        if std::mem::take(&mut self.ahead) {
            state.flat = vec![0.0; self.state.parts().len() * (self.sum.len() - 1)];
            self.state.download(&self.gpu, &mut state.flat)?;
        }
        Ok(())
    }

    fn checksum(&mut self, _: &State) -> Result<u64, EngineError> {
        let OnGpu { gpu, state, bits, .. } = self;
        let sum = |part: &CudaSlice<f32>| gpu.checksum(&part.as_view(), bits);
        Ok(state.parts().iter().map(sum).try_fold(0_u64, |all, sum| Ok::<_, CudaError>(all.rotate_left(1) ^ sum?))?)
    }

    fn snapshot(&mut self, state: &mut State) -> Result<Option<HostCopy>, EngineError> {
        let copy = self.state.snapshot(&self.gpu)?;
        if copy.is_none() {
            self.give(state)?;
        }
        Ok(copy)
    }
}
