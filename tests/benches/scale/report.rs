//! What was measured, for people, beside what the cost model says.

use elastic_tests::prelude::*;
use std::fmt;

use elastic_rendezvous::job::Timings;
use elastic_tests::cost_model::{Load, Sizes};

use super::etcd_load::EtcdLoad;

/// The size that the model looks ahead to.
const AHEAD: u32 = 10_000;

pub(crate) struct Step {
    pub(crate) what: &'static str,
    pub(crate) nodes: u32,
    pub(crate) times: Vec<Duration>,
    pub(crate) load: EtcdLoad,
}

pub(crate) struct Churned {
    pub(crate) minutes: u32,
    pub(crate) killed: u32,
    pub(crate) rounds: u64,
    /// The share of all nodes' time in which they had workers at work.
    pub(crate) at_work: f64,
    /// From the end of that time until all ran.
    pub(crate) settled: Duration,
    pub(crate) load: EtcdLoad,
}

pub(crate) struct Rest {
    pub(crate) nodes: u32,
    pub(crate) over: Duration,
    pub(crate) load: EtcdLoad,
    /// Processor time of the leader's thread, and of this process, which holds all nodes.
    pub(crate) leading: Duration,
    pub(crate) own: Duration,
}

pub(crate) struct Point {
    pub(crate) size: u32,
    pub(crate) sizes: Sizes,
    pub(crate) steps: Vec<Step>,
    pub(crate) rest: Rest,
}

impl Rest {
    /// What one node costs in a second.
    fn each(&self) -> Load {
        self.load.each(self.nodes).times(1.0 / self.over.as_secs_f64())
    }

    /// Hundredths of a processor: etcd, the leader, and all nodes with it.
    fn busy(&self) -> [f64; 3] {
        let times = [self.load.processor, self.leading.as_secs_f64(), self.own.as_secs_f64()];
        times.map(|time| time / self.over.as_secs_f64() * 100.0)
    }
}

fn quantile(times: &[Duration], part: f64) -> f64 {
    let rank = (times.len() as f64 * part).ceil() as usize;
    times.get(rank.saturating_sub(1)).copied().unwrap_or_default().as_secs_f64()
}

fn shown(load: Load) -> String {
    let Load { requests, renewals, events, received, sent } = load;
    format!("{requests:6.2} calls {renewals:6.2} renewals {events:6.2} events {received:7.0} B in {sent:7.0} B out")
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |part| quantile(&self.times, part);
        let EtcdLoad { processor, memory, refused, watches, granted, ended, .. } = self.load;
        write!(f, "  {:<40} {:6.2} s half, {:6.2} s 99 %, {:6.2} s all", self.what, at(0.5), at(0.99), at(1.0))?;
        write!(f, "\n    each node: {}", shown(self.load.each(self.nodes)))?;
        let memory = memory / 1048576.0;
        write!(
            f,
            "; etcd: {processor:.1} s processor, {memory:.0} MiB, {watches:.0} watches, {refused:.0} calls refused or \
             given up, {granted:.0} leases granted, {ended:.0} ended"
        )
    }
}

impl fmt::Display for Churned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Churned { minutes, killed, rounds, at_work, settled, load } = self;
        let settled = settled.as_secs_f64();
        write!(
            f,
            "  churn: {killed} killed and back in {minutes} min, {rounds} rounds, workers at work {:.1} %",
            at_work * 100.0
        )?;
        write!(f, ", all run {settled:.2} s after it; etcd {:.1} s processor", load.processor)
    }
}

impl fmt::Display for Rest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ([etcd, leader, own], memory) = (self.busy(), self.load.memory / 1048576.0);
        write!(f, "  at rest, in a second: {}", shown(self.each()))?;
        write!(
            f,
            "\n    of a core: etcd {etcd:.1} %, the leader {leader:.1} %, all nodes {own:.1} %; etcd {memory:.0} MiB"
        )
    }
}

/// Prints the model beside the points, and what it says of a size that was not measured.
pub(crate) fn print(points: &[Point]) {
    let renewal = Timings::default().renewal();
    println!("\nthe cost model beside what was measured, for each node: model (deviation of what was measured)");
    for Point { size, sizes, steps, rest } in points {
        for (what, model, measured) in [
            ("start", sizes.start(*size), steps[0].load.each(*size)),
            ("a second", sizes.second(*size, renewal), rest.each()),
            ("next round", sizes.round(*size), steps[1].load.each(*size)),
        ] {
            println!("{size:>6} {what:<11} {}", beside(model, measured));
        }
    }
    if let Some(point) = points.iter().max_by_key(|point| point.size) {
        ahead(point, renewal);
    }
}

/// The model's word, and by how much what was measured is more or less.
fn beside(model: Load, measured: Load) -> String {
    let of = |model: f64, measured: f64, unit: &str| {
        if model < 0.05 && measured < 0.05 {
            return format!("{model:.2} {unit} (–)");
        }
        format!("{model:.2} {unit} ({:+.0} %)", (measured / model - 1.0) * 100.0)
    };
    [
        of(model.requests, measured.requests, "calls"),
        of(model.renewals, measured.renewals, "renewals"),
        of(model.events, measured.events, "events"),
        of(model.received, measured.received, "B in"),
        of(model.sent, measured.sent, "B out"),
    ]
    .join(", ")
}

/// What a larger job would ask of its etcd, by the model, and take of its processors, in proportion to the largest size
/// that was measured.
fn ahead(Point { size, sizes, steps, rest }: &Point, renewal: Duration) {
    let nodes = f64::from(AHEAD);
    let more = nodes / f64::from(*size);
    println!("{AHEAD} nodes, by the model, and processor time in proportion to {size} nodes:");
    for (what, load, step) in [("start", sizes.start(AHEAD), &steps[0]), ("next round", sizes.round(AHEAD), &steps[1])]
    {
        let Load { requests, events, received, sent, .. } = load.times(nodes);
        let (received, sent, processor) = (received / 1e6, sent / 1e6, step.load.processor * more);
        println!(
            "  {what}: {requests:.0} calls, {events:.0} events, {received:.1} MB in, {sent:.1} MB out; etcd \
             {processor:.1} s of a core"
        );
    }
    let Load { renewals, received, sent, .. } = sizes.second(AHEAD, renewal).times(nodes);
    let [etcd, leader, _] = rest.busy().map(|busy| busy * more);
    let memory = rest.load.memory / 1048576.0 * more;
    println!(
        "  at rest: {renewals:.0} renewals a second, {:.0} kB/s in, {:.0} kB/s out; etcd {etcd:.0} % of a core, \
         {memory:.0} MiB; the leader {leader:.0} %",
        received / 1e3,
        sent / 1e3,
    );
}
