//! How a node leaves, and how it reports its end. A node that serves the store of the others leaves after them.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use elastic_rendezvous::End;
use elastic_rendezvous::job::{Keys, RankRecord, RoundRecord, Sealed, Versioned};
use elastic_store::embedded::Group;
use elastic_store::{Op, Store, StoreError, Txn};
use tokio::time::Instant;

use crate::cli::{Dialect, Options};
use crate::output::logs::{Console, ConsoleStream};
use crate::output::outcome::recorded;
use crate::output::outcome::report::{Report, ReportForm};
use crate::store::backend::Backend;
use crate::workers::final_save;

/// The longest time that an agent which serves the store waits for the other nodes to leave, if none of them may still
/// save.
const LEAVE_LAST: Duration = Duration::from_secs(10);

/// How long agents that serve the store wait, once the job has a result that stays and the others have left, for a node
/// that may not know it: it may be cut off, or its service manager starts it again.
const COMES_BACK: Duration = Duration::from_secs(20);

/// The same where the job has failed: an agent that is started again would begin it again. One that is silent for
/// this long is gone.
const GONE: Duration = Duration::from_secs(3);

/// How long such an agent waits before it says for whom, and asks less often.
const SOON: Duration = Duration::from_secs(2);

/// Where members of the last round of a job that succeeded say that they know it, or have left and need not. No worker's
/// barrier can have this name.
const KNOWN: &str = "@result";

/// Pause between two questions to the store, and later on.
const AGAIN: Duration = Duration::from_millis(50);
const LATER: Duration = Duration::from_millis(500);

/// How long an agent takes to tell the others that it does not come back.
const LAST_WORD: Duration = Duration::from_millis(250);

/// The longest time that a store which three agents hold goes without an answer while another of them takes it over.
const FAILS_OVER: Duration = Duration::from_secs(5);

/// The longest time that the console may take for the last lines.
pub(super) const FLUSH: Duration = Duration::from_secs(2);

/// Why a node's part did not end well.
pub(super) fn reason(end: &End) -> Option<&str> {
    match end {
        End::Succeeded => None,
        End::Failed(_, reason) | End::Refused(reason) | End::StoreLost(reason) => Some(reason),
        End::Closed => Some("the job was closed by its operator"),
        End::Drained => Some("this node has left the job"),
    }
}

/// How a node ends that ran no worker of a job that succeeded. It says so. Of several nodes, a spare shares the job's
/// result. A run of one node under another launcher's name has not done what it was started for, so it fails, as with
/// torchrun.
pub(super) fn without_work(options: &Options) -> anyhow::Result<End> {
    let job = &options.job;
    let why = format!("no worker ran here: job `{job}` had ended already, or ended while this node was a spare");
    if options.dialect == Dialect::Own || options.spec.max_nodes > 1 {
        tracing::warn!("{why}");
        return Ok(End::Succeeded);
    }
    anyhow::bail!("{why}; give this run an --rdzv-id of its own, or delete the old job with `elasticctl delete {job}`")
}

/// Tells the parent process how the agent ended. People read the console, and programs read the JSON report. Like
/// torchrun, the agent also writes the error file that it was itself started with.
pub(super) fn tell(report: &Report, form: ReportForm, console: &Console) {
    if report.success() {
        tracing::info!("the job has succeeded");
    } else {
        console.say(ConsoleStream::Stderr, report.to_string().into_bytes());
    }
    let error_file = std::env::var_os("TORCHELASTIC_ERROR_FILE").filter(|path| !path.is_empty());
    if let (Some(cause), Some(path)) = (report.cause(), error_file.map(PathBuf::from))
        && let Err(error) = recorded::hand_up(cause, &path)
    {
        tracing::warn!(file = %path.display(), %error, "cannot write the error file that this agent was started with");
    }
    if form == ReportForm::Json {
        console.say(ConsoleStream::Stdout, format!("{}\n", report.json()).into_bytes());
    }
}

/// How an agent leaves a store that it holds together with others, after its part ended.
#[derive(Debug, PartialEq, Eq)]
enum Parting {
    /// The job has ended: the agent stays until the others know. One that is silent for this long is gone.
    Last(Duration),
    /// The job continues without this node, which does not come back.
    ForGood,
    /// The job continues, and this node's agent may be started again.
    AtOnce,
}

impl Parting {
    fn after(end: &End) -> Parting {
        match end {
            End::Succeeded | End::Closed => Parting::Last(COMES_BACK),
            End::Failed(..) => Parting::Last(GONE),
            End::Drained => Parting::ForGood,
            End::Refused(_) | End::StoreLost(_) => Parting::AtOnce,
        }
    }
}

/// Leaves a store that agents serve, and this one perhaps. Such an agent leaves last.
pub(super) async fn leave_store(backend: &Backend, keys: &Keys, node: &str, end: &End) {
    let Some(store) = backend.store() else { return };
    if backend.serves || !backend.hosts.is_empty() {
        let said = say_known(&**store, keys, node);
        match end {
            End::Succeeded => said.await,
            End::Drained | End::Refused(_) => _ = tokio::time::timeout(LAST_WORD, said).await,
            End::Closed | End::Failed(..) | End::StoreLost(_) => {}
        }
    }
    if backend.serves {
        leave_last(store, backend.group.as_deref(), keys, end).await;
    }
}

/// Says that this node needs no result, if it is one of those whom those that serve the store wait for.
async fn say_known(store: &dyn Store, keys: &Keys, node: &str) {
    let Some((said, members)) = answered(async || members(store, keys).await).await else { return };
    if members.iter().any(|name| name == node) {
        let put = || Txn::of([Op::put(format!("{said}{node}"), Vec::new())]);
        answered(async || store.txn(put()).await).await;
    }
}

/// The members of the last round by name, and the prefix of the keys by which they say that they need no result.
async fn members(store: &dyn Store, keys: &Keys) -> Result<(String, Vec<String>), StoreError> {
    let round = store.get(&keys.round()).await?;
    let sealed = round.and_then(|kv| Versioned::<RoundRecord>::parse(&kv).ok()?.value.sealed);
    let Some(Sealed { number, plan, .. }) = sealed else { return Ok((String::new(), Vec::new())) };
    let (ranks, _) = store.range(&keys.ranks(number, plan)).await?;
    let names = ranks.iter().filter_map(|kv| Versioned::<RankRecord>::parse(kv).ok()).map(|rank| rank.value.name);
    Ok((keys.arrivals(number, KNOWN), names.collect()))
}

/// What a store answers. None where it cannot, or not for longer than another agent takes to serve it.
async fn answered<T>(ask: impl AsyncFn() -> Result<T, StoreError>) -> Option<T> {
    let begun = Instant::now();
    loop {
        match ask().await {
            Ok(answer) => return Some(answer),
            Err(error) if !error.is_transient() || begun.elapsed() >= FAILS_OVER => return None,
            Err(_) => tokio::time::sleep(AGAIN).await,
        }
    }
}

/// An agent that serves the store stays until the other nodes have read the result and left.
async fn leave_last(store: &Arc<dyn Store>, group: Option<&Group>, keys: &Keys, end: &End) {
    let parting = Parting::after(end);
    match (group, &parting) {
        (Some(group), Parting::ForGood) => {
            // How the others see it does not matter here.
            let _ = tokio::time::timeout(LAST_WORD, group.leave(Duration::ZERO)).await;
            return;
        }
        (Some(_), Parting::AtOnce) => return,
        _ => {}
    }
    let range = keys.nodes();
    let are_there = async || store.range(&range).await.map(|(nodes, _)| !nodes.is_empty());
    let longest = if final_save::may_matter(end) { LEAVE_LAST + final_save::LIMIT } else { LEAVE_LAST };
    if tokio::time::timeout(longest, others_left(are_there)).await.is_err() {
        tracing::warn!("some nodes have not left within {} s of the job's end", longest.as_secs());
    }
    // One transaction ends the job and empties the list, so others may not have read it yet: one may be cut off, and a
    // watch that was on a lost host takes a moment to come back.
    let until = Instant::now() + COMES_BACK;
    if *end == End::Succeeded {
        let left = RefCell::new(Vec::new());
        patiently(all_know(&**store, keys, &left), || named(&left.borrow()), until).await;
    }
    if let (Some(group), Parting::Last(gone)) = (group, parting) {
        patiently(group.leave(gone), || named(&group.needed_by()), until).await;
    }
    // The watches of the other nodes deliver the result before the nodes' keys go. Answers and letters that are under way
    // get a moment.
    tokio::time::sleep(Duration::from_millis(100)).await;
}

/// Waits until no member needs the result, as far as the store tells. `left` has those who do.
async fn all_know(store: &dyn Store, keys: &Keys, left: &RefCell<Vec<String>>) {
    let begun = Instant::now();
    let Some((said, members)) = answered(async || members(store, keys).await).await else { return };
    left.replace(members);
    while !left.borrow().is_empty() {
        let Some((those, _)) = answered(async || store.range(&said).await).await else { return };
        let those: BTreeSet<&str> = those.iter().filter_map(|kv| kv.key.strip_prefix(&said)).collect();
        left.borrow_mut().retain(|name| !those.contains(name.as_str()));
        if !left.borrow().is_empty() {
            tokio::time::sleep(if begun.elapsed() < SOON { AGAIN } else { LATER }).await;
        }
    }
}

/// The first of these names, and how many more there are.
fn named<S: AsRef<str>>(names: &[S]) -> String {
    const NAMED: usize = 4;
    let first: Vec<&str> = names.iter().take(NAMED).map(AsRef::as_ref).collect();
    match names.len().saturating_sub(NAMED) {
        _ if names.is_empty() => "the others".to_owned(),
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}

/// Waits, though not for ever, for those who may not know the result; says for whom.
async fn patiently(wait: impl Future<Output = ()>, whom: impl Fn() -> String, until: Instant) {
    let mut wait = std::pin::pin!(wait);
    if tokio::time::timeout_at(until.min(Instant::now() + SOON), &mut wait).await.is_ok() {
        return;
    }
    let (nodes, longest) = (whom(), until.saturating_duration_since(Instant::now()).as_secs());
    tracing::info!(
        "the job is over; its store stays for {nodes}, up to {longest} s, to tell its result: a signal (Ctrl-C) ends this"
    );
    if tokio::time::timeout_at(until, wait).await.is_err() {
        tracing::warn!("{} did not come back in time: the job's store ends with this agent", whom());
    }
}

/// Waits until no other node is there any more. Where the store does not answer, they have left.
async fn others_left(are_there: impl AsyncFn() -> Result<bool, StoreError>) {
    while answered(&are_there).await == Some(true) {
        tokio::time::sleep(AGAIN).await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn no_leader() -> Result<bool, StoreError> {
        Err(StoreError::Unavailable { endpoints: "a,b,c".into(), cause: "no leader".into() })
    }

    #[test]
    fn of_those_that_hold_a_store_one_stays_until_the_others_know_the_result() {
        let why = || "why".to_owned();
        for (end, parting) in [
            (End::Succeeded, Parting::Last(COMES_BACK)),
            (End::Closed, Parting::Last(COMES_BACK)),
            // An agent that comes back now begins the job again.
            (End::Failed(None, why()), Parting::Last(GONE)),
            // The others continue.
            (End::Drained, Parting::ForGood),
            (End::Refused(why()), Parting::AtOnce),
            (End::StoreLost(why()), Parting::AtOnce),
        ] {
            assert_eq!(Parting::after(&end), parting, "{end:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_fails_over_is_left_only_after_the_others() {
        let begun = Instant::now();
        others_left(async || match begun.elapsed().as_secs() {
            0..4 => no_leader(),
            4..8 => Ok(true),
            _ => Ok(false),
        })
        .await;
        assert!(begun.elapsed() >= Duration::from_secs(8), "{:?}", begun.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_the_others_took_with_them_is_not_waited_for() {
        let (begun, asked) = (Instant::now(), Cell::new(0));
        others_left(async || {
            asked.set(asked.get() + 1);
            if asked.get() < 10 { Ok(true) } else { no_leader() }
        })
        .await;
        assert!(asked.get() > 10 && begun.elapsed() < FAILS_OVER * 2, "{:?}", begun.elapsed());
    }
}
