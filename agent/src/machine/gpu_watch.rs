//! How the GPUs of this node's workers are, whenever somebody asks: for `/metrics`. A driver that hangs holds up nothing
//! but the answer, and that not for long. What a reading means is judged elsewhere.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::devices::shown;
use super::nvml::{GpuHealth, Nvml, NvmlError};

/// How long the driver may take. Prometheus waits ten seconds for all metrics, unless told otherwise.
const LIMIT: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GpuState {
    /// NVML's index.
    pub index: u32,
    /// Its id; unknown if it has not answered since the agent began.
    pub uuid: Option<String>,
    /// Its health and load; `None` if it does not answer.
    pub health: Option<GpuHealth>,
}

/// The GPUs that a node's workers see.
#[derive(Clone)]
pub(crate) struct GpuWatch {
    asked: Arc<WatchedGpus>,
    /// Held while the driver is asked: one call that hangs is enough.
    turn: Arc<Mutex<()>>,
}

struct WatchedGpus {
    /// `CUDA_VISIBLE_DEVICES`.
    visible: Option<String>,
    /// Loaded when first needed. `None` without a driver.
    found: OnceLock<Option<Found>>,
}

struct Found {
    nvml: Nvml,
    /// The GPUs' indices and ids. A GPU that is lost later has no id to tell.
    gpus: Vec<(u32, Option<String>)>,
}

impl GpuWatch {
    /// Those that workers with this `CUDA_VISIBLE_DEVICES` see. Nothing is asked yet.
    pub(crate) fn of(visible: Option<String>) -> GpuWatch {
        GpuWatch { asked: Arc::new(WatchedGpus { visible, found: OnceLock::new() }), turn: Arc::new(Mutex::new(())) }
    }

    /// How they are now; none without a driver. If the driver hangs, no GPU answers.
    pub(crate) async fn look(&self) -> Vec<GpuState> {
        let looked = async {
            let turn = Arc::clone(&self.turn).lock_owned().await;
            let asked = Arc::clone(&self.asked);
            let look = move || {
                let states = asked.look();
                drop(turn);
                states
            };
            spawn_blocking(look).await.unwrap_or_default()
        };
        timeout(LIMIT, looked).await.unwrap_or_else(|_| self.asked.states(|_, _| None))
    }
}

impl WatchedGpus {
    fn look(&self) -> Vec<GpuState> {
        self.found.get_or_init(|| self.find());
        self.states(|nvml, index| nvml.health(index).ok())
    }

    fn states(&self, health: impl Fn(&Nvml, u32) -> Option<GpuHealth>) -> Vec<GpuState> {
        let Some(Found { nvml, gpus }) = self.found.get().and_then(Option::as_ref) else { return Vec::new() };
        let state = |(index, uuid): &(u32, Option<String>)| GpuState {
            index: *index,
            uuid: uuid.clone(),
            health: health(nvml, *index),
        };
        gpus.iter().map(state).collect()
    }

    fn find(&self) -> Option<Found> {
        let found = || {
            let nvml = Nvml::load()?;
            let named = |index| (index, nvml.device(index).ok().map(|device| device.uuid));
            let gpus = shown(&nvml, self.visible.as_deref())?.into_iter().map(named).collect();
            Ok(Found { nvml, gpus })
        };
        match found() {
            Ok(found) => Some(found),
            Err(NvmlError::Absent(_)) => None,
            Err(error) => {
                tracing::warn!(%error, "/metrics has no numbers about GPUs");
                None
            }
        }
    }
}
