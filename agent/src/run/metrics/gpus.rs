//! What Prometheus reads about the GPUs of a node's workers: nothing if there is no driver.

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::{Labels, Seconds as Real, register};
use crate::machine::gpu_watch::GpuState;

/// A metric of each GPU.
type Each<G> = Family<Labels, G>;

pub(super) struct GpuMetrics {
    up: Each<Gauge>,
    utilization: Each<Real>,
    memory_used: Each<Gauge>,
    memory: Each<Gauge>,
    temperature: Each<Gauge>,
    power: Each<Real>,
    errors: Each<Gauge>,
}

impl GpuMetrics {
    pub(super) fn registered(registry: &mut Registry) -> GpuMetrics {
        GpuMetrics {
            up: register(registry, "gpu_up", "1 if the GPU answers, 0 if not"),
            utilization: register(
                registry,
                "gpu_utilization_ratio",
                "Share of the time in which a kernel ran on the GPU",
            ),
            memory_used: register(registry, "gpu_memory_used_bytes", "Memory of the GPU that is used"),
            memory: register(registry, "gpu_memory_bytes", "Memory of the GPU"),
            temperature: register(registry, "gpu_temperature_celsius", "Temperature of the GPU"),
            power: register(registry, "gpu_power_watts", "Power that the GPU draws"),
            errors: register(
                registry,
                "gpu_uncorrected_errors",
                "Memory errors not corrected since the driver was loaded",
            ),
        }
    }

    /// Replaces the earlier numbers.
    pub(super) fn set(&self, gpus: &[GpuState]) {
        for metric in [&self.up, &self.memory_used, &self.memory, &self.temperature, &self.errors] {
            metric.clear();
        }
        self.utilization.clear();
        self.power.clear();
        for gpu in gpus {
            let uuid = gpu.uuid.clone().unwrap_or_default();
            let labels = vec![("gpu", gpu.index.to_string()), ("uuid", uuid)];
            let whole = |metric: &Each<Gauge>, value: Option<u64>| {
                let value = value.map(|value| i64::try_from(value).unwrap_or(i64::MAX));
                value.map(|value| metric.get_or_create(&labels).set(value));
            };
            let real = |metric: &Each<Real>, value: Option<f64>| {
                value.map(|value| metric.get_or_create(&labels).set(value));
            };
            whole(&self.up, Some(u64::from(gpu.health.is_some())));
            // What a GPU does not tell has no series: zero would be a claim.
            let health = gpu.health.unwrap_or_default();
            real(&self.utilization, health.utilization.map(|percent| f64::from(percent) / 100.0));
            whole(&self.memory_used, health.memory.map(|memory| memory.used));
            whole(&self.memory, health.memory.map(|memory| memory.total));
            whole(&self.temperature, health.temperature.map(u64::from));
            real(&self.power, health.power.map(|milliwatts| f64::from(milliwatts) / 1000.0));
            whole(&self.errors, health.uncorrected_errors);
        }
    }
}
