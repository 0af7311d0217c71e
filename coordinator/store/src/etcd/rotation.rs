//! Which member of a cluster is in use, when it is left, and when a call is sent again. One piece for the clients of both
//! APIs.
//!
//! Our own rotation is in for a client's balancer, which spreads calls over members without saying which one failed,
//! and continues using one that has frozen. Each client goes round the members in an order of its own: those that a
//! member leaves behind when it dies do not all come to the same next one.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::fault::{Fault, Repeat};
use crate::Result;

/// A connection to one member, shared by calls and streams until one of them finds it broken.
pub struct Link<C> {
    /// The client.
    pub client: C,
    /// The endpoint that it speaks to.
    pub uri: String,
    said: Mutex<Said>,
    retired: watch::Sender<bool>,
}

/// What a member has said on a connection.
#[derive(Clone, Copy, Default)]
struct Said {
    /// The last time that it said something.
    heard: Option<Instant>,
    /// When a call was found late for the first time since then.
    late: Option<Instant>,
}

/// What a late call says of its member.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lateness {
    /// It says other things.
    Slow,
    /// It says nothing. `again`: another call was late, and this one was sent before that was seen.
    First { again: bool },
    /// It has not answered a call that was sent after one was late.
    Silent,
}

impl<C> Link<C> {
    fn said(&self) -> MutexGuard<'_, Said> {
        self.said.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its member said something just now.
    pub fn hear(&self) {
        *self.said() = Said { heard: Some(Instant::now()), late: None };
    }

    /// A call that was sent then is late.
    fn late(&self, sent: Instant) -> Lateness {
        let mut said = self.said();
        if said.heard.is_some_and(|heard| heard >= sent) {
            return Lateness::Slow;
        }
        match said.late {
            None => {
                said.late = Some(Instant::now());
                Lateness::First { again: false }
            }
            Some(late) if sent < late => Lateness::First { again: true },
            Some(_) => Lateness::Silent,
        }
    }

    /// Returns when somebody found the connection broken. Streams end with it: on a frozen member they would not
    /// notice for themselves for as long as a ping takes.
    pub async fn retired(&self) {
        // Cannot fail: the sender lives in self.
        let _ = self.retired.subscribe().wait_for(|retired| *retired).await;
    }
}

/// The members of one cluster, and the one in use.
pub struct Rotation<C> {
    /// The given ones, for messages.
    uris: Vec<String>,
    /// In this client's order.
    order: Vec<String>,
    seed: u64,
    state: Mutex<State<C>>,
}

struct State<C> {
    /// The member in use, or to be tried next.
    current: usize,
    link: Option<Arc<Link<C>>>,
    patience: Patience,
}

/// How many times its limit a call may take. A call that is given up costs etcd its work all the same, and a new
/// connection costs more of it. So where etcd is too slow for all that ask it, each try gives it more time: otherwise
/// none is ever answered. TCP does the same with what it sends again (RFC 6298).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Patience(u32);

impl Patience {
    const LEAST: Patience = Patience(1);
    const MOST: Patience = Patience(8);

    /// What a call may take.
    fn limit(self, limit: Duration) -> Duration {
        limit * self.0
    }

    /// A call was not answered in its time.
    fn exhausted(self) -> Patience {
        Patience((2 * self.0).min(Patience::MOST.0))
    }

    /// A call was answered: the next may take four times as long.
    fn answered(took: Duration, limit: Duration) -> Patience {
        let times = (4.0 * took.as_secs_f64() / limit.as_secs_f64()).ceil();
        Patience((times as u32).clamp(Patience::LEAST.0, Patience::MOST.0))
    }
}

/// The order in which a client of this seed goes round the members.
fn order(uris: &[String], seed: u64) -> Vec<String> {
    let mut order = uris.to_vec();
    order.shuffle(&mut StdRng::seed_from_u64(seed));
    order
}

/// Pauses before a call goes again to a member that said "not now".
fn pauses(seed: u64) -> impl Iterator<Item = Duration> {
    ExponentialBuilder::default()
        .with_min_delay(Duration::from_millis(20))
        .with_max_delay(Duration::from_millis(500))
        .with_jitter()
        .with_jitter_seed(seed)
        .without_max_times()
        .build()
}

impl<C> Rotation<C> {
    /// A rotation over these endpoints, from one that the seed picks.
    pub fn new(uris: Vec<String>, seed: u64) -> Rotation<C> {
        let order = order(&uris, seed);
        Rotation { uris, order, seed, state: Mutex::new(State { current: 0, link: None, patience: Patience::LEAST }) }
    }

    /// All members, for messages.
    pub fn endpoints(&self) -> String {
        self.uris.join(",")
    }

    /// All members.
    pub fn uris(&self) -> &[String] {
        &self.uris
    }

    /// What a call may take now that should take no longer than `limit`.
    pub fn limit(&self, limit: Duration) -> Duration {
        self.state().patience.limit(limit)
    }

    fn state(&self) -> MutexGuard<'_, State<C>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection in use.
    pub fn link(&self) -> Option<Arc<Link<C>>> {
        self.state().link.clone()
    }

    /// The member to connect to.
    pub fn uri(&self) -> &str {
        let current = self.state().current;
        &self.order[current]
    }

    /// Takes a connection to that member into use, unless another was faster.
    pub fn connected(&self, uri: &str, client: C) -> Arc<Link<C>> {
        let (uri, said, retired) = (uri.to_owned(), Mutex::default(), watch::Sender::new(false));
        let new = || Arc::new(Link { client, uri, said, retired });
        Arc::clone(self.state().link.get_or_insert_with(new))
    }

    /// It could not be connected to: the next member's turn.
    pub fn pass(&self) {
        let mut state = self.state();
        state.current = (state.current + 1) % self.order.len();
    }

    /// Takes a broken connection out of use; the next call tries the next member.
    pub fn retire(&self, link: &Arc<Link<C>>) {
        let mut state = self.state();
        if state.link.as_ref().is_some_and(|current| Arc::ptr_eq(current, link)) {
            state.link = None;
            state.current = (state.current + 1) % self.order.len();
        }
        drop(state);
        link.retired.send_replace(true);
    }

    /// Judges the connection by the fault of a request `sent` over it: one that is of no use is taken out of use. To the
    /// only member that there is, another connection would make it slower. So it is left once a further call, with twice
    /// the time, hears nothing either, and calls over the next connection get that time too.
    pub fn judge(&self, link: &Arc<Link<C>>, sent: Instant, fault: Fault) -> Fault {
        let fault = match fault {
            Fault::Late(cause) => {
                let (mut state, alone, lateness) = (self.state(), self.uris.len() == 1, link.late(sent));
                state.patience = match lateness {
                    Lateness::Slow => state.patience.exhausted(),
                    Lateness::First { again: false } if alone => state.patience.exhausted(),
                    _ if alone => state.patience,
                    // It may be frozen, and the next one not.
                    _ => Patience::LEAST,
                };
                let stays = alone && lateness != Lateness::Silent;
                if stays { Fault::Later { cause, unsure: true } } else { Fault::Late(cause) }
            }
            fault => fault,
        };
        if fault.breaks_link() {
            self.retire(link);
        }
        fault
    }

    /// Makes attempts until one is answered, as far as repeating is safe, all of them within `limit`; up to 8 times that,
    /// where earlier calls were not answered in time. An attempt gets the time at which it must have ended.
    pub async fn call<T, F, Fut>(&self, repeat: Repeat, limit: Duration, attempt: F) -> Result<T>
    where
        F: Fn(Instant) -> Fut,
        Fut: Future<Output = Result<T, Fault>>,
    {
        let deadline = Instant::now() + self.limit(limit);
        // One try for each member; a lone one gets a second, since the first may only find that it restarted.
        let mut left = self.uris.len().max(2) as u32;
        let mut pauses = pauses(self.seed ^ rand::random::<u64>());
        loop {
            let now = Instant::now();
            // A member that does not answer must leave time for the others. A write is sent to one alone.
            let alone = self.uris.len() == 1 || repeat == Repeat::Never;
            let until = if alone { deadline } else { now + (deadline - now) / left };
            let fault = match attempt(until).await {
                Ok(answer) => {
                    self.state().patience = Patience::answered(now.elapsed(), limit);
                    return Ok(answer);
                }
                Err(fault) => fault,
            };
            let pause = if fault.breaks_link() { Duration::ZERO } else { pauses.next().unwrap_or_default() };
            left -= u32::from(fault.breaks_link());
            if left == 0 || !fault.may_repeat(repeat) || Instant::now() + pause >= deadline {
                return Err(fault.into_error(repeat == Repeat::Never, &self.endpoints()));
            }
            sleep(pause).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::StoreError;

    fn uris(count: usize) -> Vec<String> {
        (0..count).map(|n| format!("http://m{n}:2379")).collect()
    }

    #[test]
    fn clients_spread_over_all_members_and_those_of_a_dead_member_over_the_others() {
        const CLIENTS: u64 = 900;
        let all = uris(3);
        let (mut first, mut second): (BTreeMap<String, u64>, BTreeMap<_, u64>) = Default::default();
        for seed in 0..CLIENTS {
            // Given a client on its first member
            let rotation = Rotation::new(all.clone(), seed);
            let mut visited = vec![rotation.uri().to_owned()];
            *first.entry(visited[0].clone()).or_default() += 1;
            // when that dies, and the next cannot be reached
            let link = rotation.connected(&visited[0], ());
            rotation.retire(&link);
            visited.push(rotation.uri().to_owned());
            *second.entry((visited[0].clone(), visited[1].clone())).or_default() += 1;
            rotation.pass();
            visited.push(rotation.uri().to_owned());
            rotation.pass();
            // then it has been at each of them once, and begins again
            assert_eq!(rotation.uri(), visited[0]);
            visited.sort();
            assert_eq!(visited, all);
            // and another one of the same seed does the same
            assert_eq!(Rotation::<()>::new(all.clone(), seed).order, rotation.order);
        }
        assert!(first.len() == 3 && first.values().all(|count| (200..400).contains(count)), "{first:?}");
        assert!(second.len() == 6 && second.values().all(|count| (90..210).contains(count)), "{second:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_is_sent_again_only_where_that_is_safe_and_never_at_once_to_who_is_busy() {
        let later = |unsure| Fault::Later { cause: "busy".into(), unsure };
        let refused = || Fault::Refused(StoreError::Invalid("no".into()));
        type Make = Box<dyn Fn() -> Fault>;
        let table: Vec<(&str, Make, Repeat, bool, bool)> = vec![
            ("not sent", Box::new(|| Fault::NotSent("x".into())), Repeat::Never, true, false),
            ("unsure, a read", Box::new(|| Fault::Unsure("x".into())), Repeat::Safe, true, false),
            ("unsure, a write", Box::new(|| Fault::Unsure("x".into())), Repeat::Never, false, false),
            ("busy", Box::new(move || later(false)), Repeat::Never, true, true),
            ("interrupted, a read", Box::new(move || later(true)), Repeat::Safe, true, true),
            ("interrupted, a write", Box::new(move || later(true)), Repeat::Never, false, false),
            ("refused", Box::new(refused), Repeat::Safe, false, false),
        ];
        for (what, fault, repeat, again, waits) in table {
            let rotation = Rotation::<()>::new(uris(3), 1);
            let (tries, begun) = (AtomicU32::new(0), Instant::now());
            let answer = rotation.call(repeat, Duration::from_secs(3), |_| {
                let first = tries.fetch_add(1, Ordering::Relaxed) == 0;
                let result = if first { Err(fault()) } else { Ok(()) };
                async move { result }
            });
            assert_eq!(answer.await.is_ok(), again, "{what}");
            assert_eq!(begun.elapsed() >= Duration::from_millis(20), waits, "{what}");
        }
        // A member that stays busy is asked with longer and longer pauses, but no longer than the call may take.
        let rotation = Rotation::<()>::new(uris(1), 1);
        let (tries, begun) = (AtomicU32::new(0), Instant::now());
        let answer: Result<()> = rotation
            .call(Repeat::Never, Duration::from_secs(3), |_| {
                tries.fetch_add(1, Ordering::Relaxed);
                async { Err(Fault::Later { cause: "busy".into(), unsure: false }) }
            })
            .await;
        assert!(matches!(answer, Err(StoreError::Unavailable { .. })));
        assert!(begun.elapsed() < Duration::from_secs(3));
        assert!((5..=14).contains(&tries.into_inner()));
    }

    #[tokio::test(start_paused = true)]
    async fn the_only_member_keeps_its_connection_at_first_and_gets_more_time() {
        const LIMIT: Duration = Duration::from_secs(3);
        let late = || Fault::Late("late".into());
        // What a member does with a call; how many members there are; whether something was said before; whether other
        // things are said meanwhile; then whether the connection stays, and how many times LIMIT the next call may take.
        type Row = (&'static str, fn() -> Fault, usize, bool, bool, bool, u32);
        let table: [Row; 7] = [
            ("late, but it says other things", late, 1, true, true, true, 8),
            ("late and silent", late, 1, true, false, true, 2),
            ("late with its first answer", late, 1, false, false, true, 2),
            ("late with its first, and there are others", late, 3, false, false, false, 1),
            ("late, and there are others", late, 3, true, true, false, 8),
            ("the connection broke", || Fault::Unsure("x".into()), 1, true, true, false, 1),
            ("refused", || Fault::Refused(StoreError::LeaseGone), 1, true, false, true, 1),
        ];
        for (what, fault, members, spoke, speaks, stays, times) in table {
            let rotation = Rotation::new(uris(members), 1);
            let link = rotation.connected(rotation.uri(), ());
            if spoke {
                link.hear();
            }
            sleep(Duration::from_millis(10)).await;
            let sent = Instant::now();
            sleep(Duration::from_secs(3)).await;
            if speaks {
                link.hear();
            }
            // However many calls are late together: those of a silent member lengthen the next once.
            for _ in 0..3 {
                rotation.judge(&link, sent, fault());
            }
            assert_eq!((rotation.link().is_some(), rotation.limit(LIMIT)), (stays, times * LIMIT), "{what}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_member_is_given_nine_seconds_and_longer_over_each_new_connection() {
        const LIMIT: Duration = Duration::from_secs(3);
        let rotation = Rotation::new(uris(1), 1);
        let silent = async || {
            let (begun, link) = (Instant::now(), rotation.connected(rotation.uri(), ()));
            while rotation.link().is_some() && begun.elapsed() < 100 * LIMIT {
                let (sent, limit) = (Instant::now(), rotation.limit(LIMIT));
                sleep(limit).await;
                rotation.judge(&link, sent, Fault::Late("late".into()));
            }
            begun.elapsed().as_secs()
        };
        assert_eq!(
            [silent().await, silent().await, silent().await, silent().await, silent().await],
            [9, 18, 36, 48, 48]
        );
        // Once it answers, the next silence is as short as the first.
        rotation.call(Repeat::Safe, LIMIT, |_| async { Ok(()) }).await.unwrap();
        assert_eq!(silent().await, 9);
    }

    #[tokio::test(start_paused = true)]
    async fn a_member_that_needs_longer_than_the_limit_is_answered_for_in_the_end() {
        const LIMIT: Duration = Duration::from_secs(3);
        let rotation = Rotation::new(uris(1), 1);
        let link = rotation.connected(rotation.uri(), ());
        // Each call costs it this long; meanwhile it answers others, and watches.
        let calls = async |cost: Duration| {
            rotation
                .call(Repeat::Never, LIMIT, |until| {
                    let (rotation, link) = (&rotation, link.clone());
                    async move {
                        let sent = Instant::now();
                        let answer = tokio::time::timeout_at(until, sleep(cost)).await;
                        link.hear();
                        answer.map_err(|_| rotation.judge(&link, sent, Fault::Late("late".into())))
                    }
                })
                .await
        };
        let tries = async |cost| {
            for number in 1..=6 {
                if calls(cost).await.is_ok() {
                    return number;
                }
            }
            0
        };
        assert_eq!(tries(Duration::from_secs(20)).await, 4, "3, 6, 12 and 24 s");
        // The next may take as long, until answers are quick again.
        assert_eq!(tries(Duration::from_secs(20)).await, 1);
        assert_eq!(tries(Duration::from_millis(50)).await, 1);
        assert_eq!(rotation.limit(LIMIT), LIMIT);
        assert_eq!(tries(Duration::from_secs(25)).await, 0, "there is an end to it");
    }
}
