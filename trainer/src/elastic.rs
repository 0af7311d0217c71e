//! The front of the library: a model and its data go in, trained parameters come out, whatever happens to the group
//! meanwhile.

use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::thread;

use elastic_collective::stop::Stop;
use elastic_proto::worker::FailureClass;

use crate::agent::Agent;
use crate::data::Data;
use crate::engine::feed::Feed;
use crate::model::Model;
use crate::settings::{Environment, Settings};
use crate::train::{Caller, Observer, Outcome, Ready, TrainError, Trainer};

/// Trains a model, elastically: in a group of workers that may grow, shrink and lose members, with the same result, bit
/// for bit, as if nothing had happened.
///
/// # A model of one's own
///
/// A program defines a [`Model`], which is parameters in a flat slice and a gradient, and [`Data`], which is samples
/// with numbers. Here a straight line is fitted to points that lie on one:
///
/// ```
/// use elastic_trainer::{Data, Elastic, Environment, Gradient, Model, Result, SampleError, Settings, Step, Tensor};
///
/// struct Line(Vec<Tensor>);
///
/// impl Model for Line {
///     type Batch = Vec<[f32; 2]>;
///     type Replica = ();
///
///     fn tensors(&self) -> &[Tensor] {
///         &self.0
///     }
///
///     fn init(&self, _seed: u64) -> Result<Vec<f32>> {
///         Ok(vec![0.0, 0.0])
///     }
///
///     fn replica(&self) -> Result<()> {
///         Ok(())
///     }
///
///     fn gradient(
///         &self,
///         _: &Step<'_>,
///         parameters: &[f32],
///         batch: &Vec<[f32; 2]>,
///         (): &mut (),
///         gradient: &mut Gradient<'_>,
///     ) -> Result<f32> {
///         gradient.fill(0.0);
///         let mut loss = 0.0;
///         for [x, y] in batch {
///             let error = parameters[0] * *x + parameters[1] - *y;
///             gradient[0] += 2.0 * error * *x;
///             gradient[1] += 2.0 * error;
///             loss += error * error;
///         }
///         Ok(loss)
///     }
/// }
///
/// struct Points;
///
/// impl Data for Points {
///     type Batch = Vec<[f32; 2]>;
///
///     fn samples(&self) -> u64 {
///         256
///     }
///
///     fn read(&self, samples: &[u64], _: &Step<'_>, batch: &mut Vec<[f32; 2]>) -> Result<(), SampleError> {
///         batch.clear();
///         batch.extend(samples.iter().map(|&sample| {
///             let x = sample as f32 / 128.0 - 1.0;
///             [x, 3.0 * x - 1.0]
///         }));
///         Ok(())
///     }
/// }
///
/// let line = Line(Tensor::sequence([("slope", vec![1]), ("height", vec![1])]));
/// let environment = Environment::read(|name| std::env::var(name).ok())?;
/// let settings = Settings { lr: 0.05, ..Settings::default() };
/// let outcome = Elastic::new(settings, environment).run(&line, &Points)?;
///
/// let [slope, height] = outcome.state.parameters() else { unreachable!() };
/// assert!((slope - 3.0).abs() < 0.01 && (height + 1.0).abs() < 0.01);
/// # Ok::<(), elastic_trainer::Error>(())
/// ```
///
/// # Elastically
///
/// That program trains alone where it is started by hand. Started by an agent it is one of a group: its [`Environment`]
/// tells it its place, and the agent's socket the rest.
///
/// ```text
/// elastic-agent --nnodes=1:4 --nproc-per-node=2 … --no-python ./line
/// ```
///
/// Nothing in the model or its data knows of ranks. The step's number fixes its samples, and their cut into
/// [`Settings::shards`] logical shards, whose gradients are added in one order; ranks merely share the shards. When a
/// worker is lost, the others continue after the step that they hold, and give it to newcomers. Where no worker holds
/// one, training resumes from the last committed checkpoint in [`Settings::checkpoint_dir`].
///
/// To leave in good order when its node is taken away, a program also listens for signals, with [`stop`](Self::stop).
/// `trainer/examples/line.rs` is such a program, with flags.
pub struct Elastic<'a> {
    settings: Settings,
    environment: Environment,
    stop: Stop,
    rescue: Vec<String>,
    out: Option<&'a mut dyn Write>,
    observer: Option<&'a mut dyn Observer>,
}

impl<'a> Elastic<'a> {
    /// A run with these settings, in the place that the environment tells.
    pub fn new(settings: Settings, environment: Environment) -> Elastic<'a> {
        Elastic { settings, environment, stop: Stop::default(), rescue: Vec::new(), out: None, observer: None }
    }

    /// Ends early when this flag is raised. Most programs want [`Stop::on_signals`].
    pub fn stop(self, stop: Stop) -> Elastic<'a> {
        Elastic { stop, ..self }
    }

    /// The words of a command line that runs the command `checkpoint rescue` of this very program, up to its flags:
    /// `["/bin/line", "checkpoint", "rescue"]`. An agent that ends with its job runs it, and so saves the snapshots that
    /// it keeps in memory. Without it they end with the agent: what was not written to [`Settings::checkpoint_dir`] by
    /// then is lost.
    pub fn rescue(self, words: impl IntoIterator<Item = String>) -> Elastic<'a> {
        Elastic { rescue: words.into_iter().collect(), ..self }
    }

    /// Where rank 0 prints its progress, instead of standard output.
    pub fn output(self, out: &'a mut dyn Write) -> Elastic<'a> {
        Elastic { out: Some(out), ..self }
    }

    /// What hears of rounds, steps, evaluations and commits.
    pub fn observer(self, observer: &'a mut dyn Observer) -> Elastic<'a> {
        Elastic { observer: Some(observer), ..self }
    }

    /// Trains until the last step, the first error that no next round can fix, or a stop; tells the agent why when it
    /// is an error.
    ///
    /// After that a signal ends the process at once.
    ///
    /// After an error whose [`TrainError::is_stuck`] is true (only NCCL brings it about), the program must end by
    /// `libc::_exit(1)`: whatever else ends a process would wait for a thread that never comes back.
    pub fn run<M: Model>(self, model: &M, data: &dyn Data<Batch = M::Batch>) -> Result<Outcome, TrainError> {
        let Elastic { settings, environment, stop, rescue, out, observer } = self;
        let mut stdout = io::stdout();
        let out: &mut dyn Write = match out {
            Some(out) => out,
            None => &mut stdout,
        };
        let feed = Feed::new(data, &settings);
        // A read that a reader is at holds up the end of this function, but neither the peers nor the agent.
        thread::scope(|scope| {
            // To be known to the agent is to be ready: what takes long comes first.
            let ready = Ready::make(&settings, &environment, model, &feed);
            let ready = match ready {
                // No round has begun that it could fail in, and this worker must not seem ready for one.
                Err(error) if environment.warm_up => return Err(error),
                ready => ready,
            };
            let _readers = ready.is_ok().then(|| feed.start(scope));
            let (mut agent, assignment) = match &environment.agent {
                None => (None, None),
                Some(path) => {
                    let (agent, assignment) = Agent::register(path, &environment, &stop)?;
                    (Some(agent), Some(assignment))
                }
            };
            let observer = observer.map(|observer| observer as &mut dyn Observer);
            let caller = Caller { rescue, out, observer };
            let train = || {
                ready
                    .map(|ready| Trainer::new(&settings, &environment, assignment, &mut agent, &stop, ready, caller))
                    .and_then(Trainer::train)
            };
            let result = catch_unwind(AssertUnwindSafe(train));
            if let Some(agent) = &mut agent {
                match &result {
                    Ok(Ok(_) | Err(TrainError::Stopped)) => {}
                    Ok(Err(error)) => agent.failing(error.class(), &error.to_string()),
                    // What it panicked with, and where, is on standard error.
                    Err(_) => agent.failing(FailureClass::Permanent, ""),
                }
            }
            // Nothing is left to save: a later signal need not wait for a reader.
            stop.release_signals();
            result.unwrap_or_else(|panic| resume_unwind(panic))
        })
    }
}
