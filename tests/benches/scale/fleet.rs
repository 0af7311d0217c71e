//! All nodes of one job: real drivers, each with a connection to etcd of its own, on racks that can be frozen or killed.
//! Those that this process has no descriptors for run in others: see `crew`.

use anyhow::{Context, Result, ensure};
use elastic_rendezvous::job::{EventRecord, Timings};
use elastic_rendezvous::time::Time;
use elastic_store::{KeyValue, OpResult};
use elastic_tests::cost_model::Sizes;
use elastic_tests::prelude::*;
use elastic_tests::rack::{Frozen, Rack};

use super::crew::{Crew, Seen};

/// Nodes of a rack, besides that of the node that leads first and those that are to die alone: a job has 25.
pub(crate) fn rack_of(size: u32) -> u32 {
    size.div_ceil(25).min(300)
}

/// The least nodes of a round. Where nodes come over some time, more of them make fewer rounds.
fn least(size: u32, over: Duration) -> u32 {
    if over.is_zero() { size / 2 } else { size - size / 20 }
}

/// Which connections to etcd the nodes of a job have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Connections {
    /// Each its own, as agents have.
    Own,
    /// Those of a rack share one.
    Shared,
}

/// How the nodes of a job come.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Manner {
    pub(crate) connections: Connections,
    /// From the first to the last.
    pub(crate) over: Duration,
}

pub(crate) struct Group {
    rack: Rack,
    nodes: Vec<InProcessNode>,
}

impl Group {
    pub(crate) fn names(&self) -> Vec<String> {
        self.nodes.iter().map(|node| node.name.clone()).collect()
    }

    pub(crate) fn size(&self) -> u32 {
        self.nodes.len() as u32
    }

    pub(crate) fn rack(&self) -> &Rack {
        &self.rack
    }
}

pub(crate) struct Fleet {
    address: String,
    job: JobId,
    keys: Keys,
    spec: Spec,
    store: EtcdStore,
    pub(crate) manner: Manner,
    crews: Vec<Crew>,
    pub(crate) first: Option<Group>,
    pub(crate) singles: Vec<Group>,
    pub(crate) racks: Vec<Group>,
}

impl Fleet {
    /// A job for so many nodes; none is there yet.
    pub(crate) fn new(address: &str, size: u32, manner: Manner) -> Result<Fleet> {
        let job: JobId = format!("scale-{size}").parse()?;
        let keys = Keys::new(Keys::DEFAULT_PREFIX, &job);
        let spec =
            Spec { timings: Timings::default(), max_restarts: 100, ..quick_spec(least(size, manner.over), size) };
        let store = EtcdStore::connect(EtcdConfig::new([address]))?;
        let (crews, first, singles, racks) = (Vec::new(), None, Vec::new(), Vec::new());
        Ok(Fleet { address: address.to_owned(), job, keys, spec, store, manner, crews, first, singles, racks })
    }

    /// Has the node that is to lead come, so that its thread is its own.
    pub(crate) async fn elect(&mut self, within: Duration) -> Result<()> {
        self.first = Some(self.come(vec!["first".into()], Duration::ZERO).await?);
        self.until_led(within, |_| true).await.map(drop)
    }

    /// Has all others come; `alone` of them are to die alone. Returns when their first calls are under way.
    /// A process holds no more than `most` of them, a rack no more than `rack`. Each rack has a thread.
    pub(crate) async fn fill(&mut self, size: u32, alone: u32, most: u32, rack: u32) -> Result<()> {
        let others = size.saturating_sub(1 + alone);
        let rack = rack.clamp(1, most / 2);
        let names: Vec<String> = (0..others).map(|node| format!("node-{node:05}")).collect();
        let here = if size <= most { others } else { (most / 2).max(2 * rack) };
        let (here, elsewhere) = names.split_at(here as usize);
        let mut crews = Vec::new();
        let processes = elsewhere.len().div_ceil(most as usize).max(1);
        for part in elsewhere.chunks(elsewhere.len().div_ceil(processes).max(1)) {
            crews.push((Crew::start(&self.address, self.spec.max_nodes, self.manner)?, part));
        }
        let elsewhere = crews.iter_mut().map(|(crew, part)| crew.come(part, rack));
        let elsewhere = futures::future::try_join_all(elsewhere);
        let singles: Vec<_> = (0..alone).map(|node| vec![format!("alone-{node:03}")]).collect();
        let racks = here.chunks(rack as usize).map(<[String]>::to_vec).chain(singles);
        let here = futures::future::try_join_all(racks.map(|names| self.come(names, self.manner.over)));
        let (come, _) = futures::future::try_join(here, elsewhere).await?;
        let (singles, racks) = come.into_iter().partition(|group| group.names()[0].starts_with("alone"));
        (self.singles, self.racks) = (singles, racks);
        self.crews = crews.into_iter().map(|(crew, _)| crew).collect();
        Ok(())
    }

    /// Starts nodes of these names, on a rack of their own, one after the other in this time.
    pub(crate) async fn come(&self, names: Vec<String>, over: Duration) -> Result<Group> {
        let rack = Rack::start()?;
        let (address, keys, job, spec) = (self.address.clone(), self.keys.clone(), self.job.clone(), self.spec.clone());
        let (connections, pause) = (self.manner.connections, over / names.len() as u32);
        let starting = rack.handle().spawn(async move {
            let mut nodes = Vec::new();
            let connect = || EtcdStore::connect(EtcdConfig::new([address.clone()]));
            let shared = connect()?;
            for name in names {
                let store = if connections == Connections::Shared { shared.clone() } else { connect()? };
                let store: Arc<dyn Store> = Arc::new(store);
                nodes.push(start_node(store, keys.clone(), &job, spec.clone(), &name).await?);
                if !pause.is_zero() {
                    tokio::time::sleep(pause).await;
                }
            }
            anyhow::Ok(nodes)
        });
        Ok(Group { nodes: starting.await??, rack })
    }

    fn groups(&self) -> impl Iterator<Item = &Group> {
        self.first.iter().chain(&self.singles).chain(&self.racks)
    }

    fn nodes(&self) -> impl Iterator<Item = &InProcessNode> {
        self.groups().flat_map(|group| &group.nodes)
    }

    fn size_here(&self) -> u32 {
        self.groups().map(Group::size).sum()
    }

    pub(crate) fn size(&self) -> u32 {
        self.size_here() + self.crews.iter().map(Crew::size).sum::<u32>()
    }

    /// What the nodes of this process do.
    pub(crate) fn seen_here(&self) -> Seen {
        let number = |node: &InProcessNode| node.place.borrow().as_ref().map(|(start, _)| start.round.number);
        let (mut at_work, mut round) = (0, 0);
        for number in self.nodes().filter_map(number) {
            (at_work, round) = (at_work + 1, round.max(number));
        }
        Seen { at_work, round }
    }

    /// How many have workers at work, and the newest round that a node runs in.
    pub(crate) async fn seen(&mut self) -> Result<Seen> {
        let mut seen = self.seen_here();
        for more in futures::future::try_join_all(self.crews.iter_mut().map(Crew::look)).await? {
            seen = Seen { at_work: seen.at_work + more.at_work, round: seen.round.max(more.round) };
        }
        Ok(seen)
    }

    /// The other processes.
    pub(crate) fn crews(&self) -> &[Crew] {
        &self.crews
    }

    /// Waits until all run in one round, this one or later: how long after `begun` each of them started its workers.
    pub(crate) async fn all_run(&mut self, at_least: u64, begun: Time, within: Duration) -> Result<Vec<Duration>> {
        let (size, mut crews) = (self.size(), std::mem::take(&mut self.crews));
        let elsewhere = crews.iter_mut().map(|crew| crew.run(at_least, size, begun, within));
        let elsewhere = futures::future::try_join_all(elsewhere);
        let (mut times, more) =
            futures::future::try_join(self.run_here(at_least, size, begun, within), elsewhere).await?;
        times.extend(more.into_iter().flatten());
        self.crews = crews;
        times.sort();
        Ok(times)
    }

    /// The same, of those in this process, in a round of so many.
    pub(crate) async fn run_here(
        &mut self,
        at_least: u64,
        size: u32,
        begun: Time,
        within: Duration,
    ) -> Result<Vec<Duration>> {
        let until = begun + within;
        let mut times = Vec::new();
        let groups = self.first.iter_mut().chain(&mut self.singles).chain(&mut self.racks);
        for node in groups.flat_map(|group| &mut group.nodes) {
            node.runs(at_least, size, until.since(elastic_store::clock::now())).await?;
            let place = node.place.borrow();
            times.push(place.as_ref().map_or(Duration::ZERO, |(_, at)| at.since(begun)));
        }
        Ok(times)
    }

    pub(crate) fn freeze(&mut self) -> Result<(Group, Frozen)> {
        let group = self.racks.pop().context("a rack")?;
        let frozen = group.rack.freeze();
        Ok((group, frozen))
    }

    pub(crate) async fn until_led(
        &self,
        within: Duration,
        fits: impl Fn(&LeaderRecord) -> bool,
    ) -> Result<LeaderRecord> {
        let until = elastic_store::clock::now() + within;
        loop {
            // Where thousands come, etcd may be late with an answer.
            if let Ok(Some(kv)) = self.store.get(&self.keys.leader()).await
                && let Ok(leader) = Versioned::<LeaderRecord>::parse(&kv)
                && fits(&leader.value)
            {
                return Ok(leader.value);
            }
            ensure!(elastic_store::clock::now() < until, "no such leader within {within:?}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// What the leaders have written in the job's history, the newest last: when, in milliseconds, and each round's
    /// state and reason.
    pub(crate) async fn history(&self) -> Result<Vec<(u64, String)>> {
        let (lines, _) = self.store.range(&self.keys.events()).await?;
        let line = |kv: &KeyValue| {
            let event = Versioned::<EventRecord>::parse(kv).map_err(anyhow::Error::msg)?.value;
            Ok((event.at_ms, format!("round {} {}: {}", event.round, event.state, event.reason)))
        };
        lines.iter().map(line).collect()
    }

    /// How long the job's records are, on average.
    pub(crate) async fn sizes(&self) -> Result<Sizes> {
        let keys = &self.keys;
        let read = Txn::of([
            Op::range(keys.nodes()),
            Op::range(keys.rounds()),
            Op::get(keys.round()),
            Op::get(keys.leader()),
            Op::get(keys.spec()),
            Op::get(keys.secret()),
        ]);
        let read = self.store.txn(read).await?;
        let mean = |at: usize, of: fn(&KeyValue) -> usize| {
            let values = read.results.get(at).map(OpResult::values).unwrap_or_default();
            values.iter().map(of).sum::<usize>() as f64 / values.len().max(1) as f64
        };
        let value = |at| mean(at, |kv| kv.value.len());
        Ok(Sizes {
            key: mean(0, |kv| kv.key.len()),
            node: value(0),
            rank: value(1),
            round: value(2),
            leader: value(3),
            joined: value(4) + value(5),
        })
    }

    pub(crate) fn fail_one(&self) -> Result<()> {
        let node = self.racks.last().and_then(|group| group.nodes.last()).context("a node")?;
        node.fail(elastic_rendezvous::job::FailureClass::Own, "on purpose");
        Ok(())
    }

    /// All workers end well: waits until all nodes have ended.
    pub(crate) async fn finish(mut self, within: Duration) -> Result<()> {
        let crews = std::mem::take(&mut self.crews);
        let elsewhere = futures::future::try_join_all(crews.into_iter().map(|crew| crew.finish(within)));
        futures::future::try_join(self.finish_here(within), elsewhere).await.map(drop)
    }

    pub(crate) async fn finish_here(self, within: Duration) -> Result<()> {
        self.nodes().for_each(InProcessNode::finish);
        let until = elastic_store::clock::now() + within;
        let groups = self.first.into_iter().chain(self.singles).chain(self.racks);
        for group in groups {
            for node in group.nodes {
                node.parting(until.since(elastic_store::clock::now())).await?;
            }
        }
        Ok(())
    }
}
