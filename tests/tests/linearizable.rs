//! Several clients read and write a few keys while the store's servers and the ways to them fail. What all of them saw is
//! judged by [`elastic_tests::linearizability`], and what a watch delivered by the same history.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use elastic_store::embedded::EmbeddedServer;
use elastic_store::{Event, Guard, KeyValue, OpResult};
use elastic_tests::linearizability::{Action, Call, Outcome, check};
use elastic_tests::prelude::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const KEYS: u8 = 3;
const CLIENTS: u64 = 5;
const PREFIX: &str = "/elastic/linearizable/";
const LIMIT: Duration = Duration::from_secs(20);
/// A client's deadline. Faults last less long, and longer.
const PATIENCE: Duration = Duration::from_millis(600);
/// Between two calls of a client, so that a history is judged in a moment.
const PAUSE: Duration = Duration::from_millis(3);
/// After a call whose outcome is unknown: each of them makes the search branch.
const UNSURE: Duration = Duration::from_millis(300);
/// Of the search, which keeps some hundred bytes of each.
const MOST_STEPS: usize = 1_000_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_linearizable_through_our_client_under_faults() {
    on_etcd(Duration::from_secs(5)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: make chaos"]
async fn etcd_is_linearizable_through_our_client_under_many_faults() {
    // Many short histories: deletes of unknown outcome make the search of a long one take minutes.
    for _ in 0..12 {
        on_etcd(Duration::from_secs(6)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_embedded_store_is_linearizable_under_faults_of_the_network() {
    let server = EmbeddedServer::bind(([127, 0, 0, 1], 0).into(), false).await.expect("a free port");
    let address = server.address().to_string();
    // It ends with the test.
    tokio::spawn(server.serve(std::future::pending()));
    let proxies = [FaultProxy::start(address.clone()).await];
    let mut run = Run::start(EtcdConfig::new([address]), &proxies).await;
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until {
        run.cut_ways(&proxies).await;
    }
    stall_all(&proxies).await;
    run.ends().await;
}

/// No answer comes for a time, so that some outcome is unknown, whatever was chosen before.
async fn stall_all(ways: &[FaultProxy]) {
    ways.iter().for_each(FaultProxy::stall_answers);
    tokio::time::sleep(2 * PATIENCE).await;
    ways.iter().for_each(FaultProxy::heal);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_held_by_three_is_linearizable_while_they_end_and_their_ways_fail() {
    on_three(Duration::from_secs(6)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes: make chaos"]
async fn a_store_held_by_three_is_linearizable_under_many_faults() {
    for _ in 0..12 {
        on_three(Duration::from_secs(8)).await;
    }
}

/// One of the three at a time ends, or is cut off from clients and the others.
async fn on_three(time: Duration) {
    let mut store = Replicated::start().await;
    let config = store.config();
    let until = Instant::now() + time;
    let mut run = Run::start(config, store.ways()).await;
    while Instant::now() < until {
        match run.choices.random_range(0..3) {
            0 => {
                let at = store.serving().await;
                store.end(at);
                tokio::time::sleep(Duration::from_millis(run.choices.random_range(0..2500))).await;
                store.begin(at);
            }
            1 => {
                let at = run.choices.random_range(0..3);
                store.end(at);
                store.begin(at);
            }
            _ => run.cut_ways(store.ways()).await,
        }
        // Two faults at once are more than it promises to bear.
        store.all_vote().await;
    }
    stall_all(store.ways()).await;
    run.ends().await;
}

async fn on_etcd(time: Duration) {
    let mut cluster = EtcdCluster::start_with(EtcdOptions::default()).await;
    let mut proxies = Vec::new();
    for member in &cluster.members {
        proxies.push(FaultProxy::start(member.address()).await);
    }
    let mut run = Run::start(cluster.config(), &proxies).await;
    let until = Instant::now() + time;
    while Instant::now() < until {
        match run.choices.random_range(0..4) {
            0 => {
                let leader = cluster.leader(None).await;
                cluster.members[leader].kill();
                tokio::time::sleep(Duration::from_millis(200)).await;
                cluster.members[leader].restart().await;
            }
            1 => {
                let member = &cluster.members[run.choices.random_range(0..3)];
                member.pause().await;
                tokio::time::sleep(Duration::from_millis(800)).await;
                member.resume();
            }
            _ => run.cut_ways(&proxies).await,
        }
    }
    stall_all(&proxies).await;
    run.ends().await;
}

/// Clients at work, and all that they have seen.
struct Run {
    choices: SmallRng,
    config: EtcdConfig,
    first: Revision,
    watcher: Watcher,
    over: Arc<AtomicBool>,
    values: Arc<AtomicU64>,
    clients: Vec<tokio::task::JoinHandle<Vec<Call>>>,
}

impl Run {
    /// config: how the store is reached where nothing fails. The clients reach it through the proxies.
    async fn start(config: EtcdConfig, proxies: &[FaultProxy]) -> Run {
        let seed = match std::env::var("ELASTIC_TEST_SEED") {
            Ok(seed) => seed.parse().expect("ELASTIC_TEST_SEED is a number"),
            Err(_) => RandomState::new().hash_one("a seed"),
        };
        println!("seed {seed}");
        let store = EtcdStore::connect(config.clone()).unwrap();
        let (_, first) = store.range(PREFIX).await.unwrap();
        let (over, values, clock) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(1)), Instant::now());
        let mut ways = EtcdConfig::new(proxies.iter().map(FaultProxy::address));
        ways.call_timeout = PATIENCE;
        // It watches through all faults, too.
        let watched = EtcdStore::connect(ways.clone()).unwrap();
        let watcher = watched.watch(Scope::Prefix(PREFIX.into()), Revision(first.0 + 1)).await.unwrap();
        let clients = (0..CLIENTS).map(|number| {
            let client = Client {
                // One for each: a client of ours does not take an answer that is older than one it had.
                store: EtcdStore::connect(ways.clone()).unwrap(),
                choices: SmallRng::seed_from_u64(seed ^ number.wrapping_mul(0x1234_5678_9abc_def1)),
                values: values.clone(),
                clock,
                known: BTreeMap::new(),
            };
            tokio::spawn(client.work(over.clone()))
        });
        Run { clients: clients.collect(), choices: SmallRng::seed_from_u64(seed), config, first, watcher, over, values }
    }

    /// One of the ways fails for a while.
    async fn cut_ways(&mut self, proxies: &[FaultProxy]) {
        let way = &proxies[self.choices.random_range(0..proxies.len())];
        match self.choices.random_range(0..4) {
            0 => way.cut(),
            1 => way.refuse(),
            2 => way.stall(),
            _ => way.stall_answers(),
        }
        tokio::time::sleep(Duration::from_millis(100 + self.choices.random_range(0..900))).await;
        way.heal();
        tokio::time::sleep(Duration::from_millis(200)).await;
    }

    async fn ends(mut self) {
        // On a busy machine the time of the faults is too short for enough calls; four in ten read.
        let calls = async || (self.values.load(Ordering::Relaxed) > 600).then_some(());
        eventually("the clients have made enough calls", LIMIT, calls).await;
        self.over.store(true, Ordering::Relaxed);
        let mut history = Vec::new();
        for client in self.clients.drain(..) {
            history.extend(within("a client ends", LIMIT, client).await.unwrap());
        }
        let store = EtcdStore::connect(self.config.clone()).unwrap();
        let (_, last) = eventually("the store answers", LIMIT, async || store.range(PREFIX).await.ok()).await;
        let events = self.watched(last).await;

        let count = |fits: fn(&Call) -> bool| history.iter().filter(|call| fits(call)).count();
        let read = count(|call| matches!(call.outcome, Outcome::Found(..)));
        let written = count(|call| matches!(call.outcome, Outcome::Written(_)));
        let refused = count(|call| matches!(call.outcome, Outcome::Refused(_)));
        let guarded = |call: &Call| matches!(call.action, Action::Write { guard: Some(_), .. });
        let exchanged =
            history.iter().filter(|&call| guarded(call) && matches!(call.outcome, Outcome::Written(_))).count();
        let unknown = count(|call| call.outcome == Outcome::Unknown);
        let mut calls: Vec<(u64, u64)> = history.iter().map(|call| (call.begun, call.ended)).collect();
        calls.sort_unstable();
        let overlapping = calls.windows(2).filter(|pair| pair[1].0 < pair[0].1).count();
        println!(
            "{read} reads, {written} writes ({exchanged} with a guard), {refused} refused, {unknown} unknown; \
             {overlapping} overlap; {} events",
            events.len()
        );

        // Then one store could have done it
        check(told_by(&events, &history), self.first.0, MOST_STEPS)
            .unwrap_or_else(|why| panic!("not linearizable: {why}"));

        // ... and the watch had each write once, in order, without gaps
        let revisions: Vec<i64> = events.iter().map(|event| event.revision().0).collect();
        assert_eq!(revisions, (self.first.0 + 1..=last.0).collect::<Vec<_>>(), "what the watch delivered");
        for call in &history {
            let (Action::Write { value: Some(value), .. }, Outcome::Written(at)) = (call.action, call.outcome) else {
                continue;
            };
            let event = &events[usize::try_from(at - self.first.0 - 1).unwrap()];
            assert!(
                matches!(event, Event::Put(kv) if kv.key == key(call.key) && number(kv) == value),
                "{call:?}: {event:?}"
            );
        }

        // ... and there was enough to judge
        assert!(read > 50 && written > 50 && exchanged > 5 && refused > 5 && unknown > 0 && overlapping > 50);
    }

    /// All that the watch delivers up to a revision.
    async fn watched(&mut self, last: Revision) -> Vec<Event> {
        let mut events: Vec<Event> = Vec::new();
        while events.last().is_none_or(|event| event.revision() < last) {
            match within("the watch delivers all", LIMIT, self.watcher.recv()).await {
                Some(WatchUpdate::Events(more)) => events.extend(more),
                other => panic!("the watch ended, or lost its history: {other:?}"),
            }
        }
        // A write whose client has given it up may be done even now.
        events.retain(|event| event.revision() <= last);
        events
    }
}

struct Client {
    store: EtcdStore,
    choices: SmallRng,
    values: Arc<AtomicU64>,
    clock: Instant,
    /// When each key was last written, as this client knows it: zero, if it was not there.
    known: BTreeMap<u8, i64>,
}

impl Client {
    async fn work(mut self, over: Arc<AtomicBool>) -> Vec<Call> {
        let mut history = Vec::new();
        while !over.load(Ordering::Relaxed) {
            let key = self.choices.random_range(0..KEYS);
            let guard = Some(self.known.get(&key).copied().unwrap_or(0));
            let value = Some(self.values.fetch_add(1, Ordering::Relaxed));
            let action = match self.choices.random_range(0..10) {
                0..4 => Action::Read,
                4..6 => Action::Write { guard: None, value },
                6..9 => Action::Write { guard, value },
                _ => Action::Write { guard: None, value: None },
            };
            let begun = self.now();
            let answer = self.ask(key, action).await;
            let outcome = match answer {
                Ok(outcome) => outcome,
                Err(error) if error.outcome_unknown() => Outcome::Unknown,
                // Nothing was written, it says: if that is not true, a value from nowhere shows up.
                Err(StoreError::Unavailable { .. }) => {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
                Err(error) => panic!("{action:?}: {error}"),
            };
            match outcome {
                Outcome::Found(_, held) => self.known.insert(key, held.map_or(0, |(_, modified)| modified)),
                Outcome::Written(at) => self.known.insert(key, at),
                _ => None,
            };
            history.push(Call { key, action, outcome, begun, ended: self.now() });
            tokio::time::sleep(if outcome == Outcome::Unknown { UNSURE } else { PAUSE }).await;
        }
        history
    }

    async fn ask(&self, at: u8, action: Action) -> Result<Outcome, StoreError> {
        let Action::Write { guard, value } = action else {
            let result = self.store.txn(Txn::of([Op::get(key(at))])).await?;
            let held = result.results.first().and_then(OpResult::value).map(|kv| (number(kv), kv.mod_revision.0));
            return Ok(Outcome::Found(result.revision.0, held));
        };
        let op = match value {
            Some(value) => Op::put(key(at), value.to_string()),
            None => Op::delete(key(at)),
        };
        let guard = guard.map(|modified| Guard::modified(key(at), Revision(modified)));
        let result = self.store.txn(Txn::of([op]).guarded(guard)).await?;
        let outcome = if result.succeeded { Outcome::Written } else { Outcome::Refused };
        Ok(outcome(result.revision.0))
    }

    fn now(&self) -> u64 {
        u64::try_from(self.clock.elapsed().as_nanos()).unwrap()
    }
}

/// The history, in which the watch tells of puts with an unknown outcome whether and where they were done. Without that
/// the search of a long one has too much to choose. What the watch says is judged with the rest.
fn told_by(events: &[Event], history: &[Call]) -> Vec<Call> {
    let puts = events.iter().filter_map(|event| match event {
        Event::Put(kv) => Some((number(kv), kv.mod_revision.0)),
        Event::Delete { .. } => None,
    });
    let puts: BTreeMap<u64, i64> = puts.collect();
    let told = |call: &Call| match (call.outcome, call.action) {
        (Outcome::Unknown, Action::Write { value: Some(value), .. }) => {
            let at = puts.get(&value)?;
            Some(Call { outcome: Outcome::Written(*at), ended: u64::MAX, ..call.clone() })
        }
        _ => Some(call.clone()),
    };
    history.iter().filter_map(told).collect()
}

fn key(number: u8) -> String {
    format!("{PREFIX}{number}")
}

fn number(kv: &KeyValue) -> u64 {
    std::str::from_utf8(&kv.value).unwrap().parse().unwrap()
}
