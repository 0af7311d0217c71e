//! A leader acts on what it knows. This part of promises 2, 5 and 6 cannot be judged by the store, since what the store
//! holds may not have reached the leader yet.

use super::budget::lost_again;
use elastic_rendezvous::Present;
use elastic_rendezvous::job::{FailureClass, Keys, NodeId, Phase, RestartPolicy, RoundRecord, RoundState};
use elastic_rendezvous::time::Time;
use elastic_rendezvous::view::View;
use elastic_store::{Op, Revision, Txn};

/// A failure that is known is charged, the strongest one is the cause, and a peer's blame is judged when every member
/// had its say.
pub(super) fn acted_on(now: Time, keys: &Keys, view: &View, txn: &Txn) -> Result<(), String> {
    let old = &view.round.value;
    let written = txn.then.iter().find_map(|op| match op {
        Op::Put { key, value, .. } if *key == keys.round() => serde_json::from_slice::<RoundRecord>(value).ok(),
        _ => None,
    });
    let Some(new) = written.filter(|_| old.state == RoundState::Running) else { return Ok(()) };
    let reports: Vec<(&NodeId, &Present, FailureClass)> = view
        .roster
        .members()
        .filter_map(|(node, _)| Some((node, view.roster.node(node)?)))
        .filter(|(_, present)| (present.record.phase, present.record.round) == (Phase::Failed, Some(old.number)))
        .filter_map(|(node, present)| Some((node, present, present.record.failure.as_ref()?.class)))
        .collect();
    let strongest = reports.iter().map(|(.., class)| *class).max();
    let charged = new.restarts > old.restarts;
    let failed = new.state == RoundState::Failed;
    if strongest == Some(FailureClass::Own) {
        if new.state == RoundState::Forming && !charged {
            return Err(format!("the failure of {} is known and not charged: {}", reports[0].0, new.reason));
        }
        if failed && new.cause.as_ref().is_none_or(|cause| cause.class != FailureClass::Own) {
            return Err(format!("a worker failed by itself, and the cause is {:?}", new.cause));
        }
    }
    // Under the other policy every change is charged.
    let by_failures = view.spec.restart_policy == RestartPolicy::Failures;
    // A node that is lost soon after each start is charged for that, whatever its peers say.
    let for_a_loss = lost_again(old, &new) || new.cause.as_ref().is_some_and(|cause| cause.class == FailureClass::Lost);
    if strongest == Some(FailureClass::Peer) && by_failures && (charged || failed) && !for_a_loss {
        let said = reports.iter().map(|(_, present, _)| present.said).min().unwrap_or(now);
        let silent = view.roster.members().find(|(node, _)| {
            let ended = |present: &Present| matches!(present.record.phase, Phase::Failed | Phase::Done);
            let reported = view.roster.node(node).is_some_and(ended);
            let heard = view.roster.contact(node).and_then(|contact| contact.heard).is_some_and(|heard| heard >= said);
            !reported && !heard
        });
        if let Some((node, _)) = silent.filter(|_| now < said + view.spec.timings.lease_ttl) {
            return Err(format!("a peer was blamed and believed before {node} had its say: {}", new.reason));
        }
    }
    Ok(())
}

/// Whether a transaction is the first part of a decision: it evicts, and the round's record is still to come.
pub(super) fn only_evicts(keys: &Keys, txn: &Txn) -> bool {
    let (evictions, round) = (keys.evictions(), keys.round());
    let mut puts = txn.then.iter().filter_map(|op| if let Op::Put { key, .. } = op { Some(key) } else { None });
    puts.clone().any(|key| key.starts_with(&evictions)) && puts.all(|key| *key != round)
}

/// A leader keeps what its watch has told it, whatever it reads or does meanwhile.
pub(super) fn kept(view: &View, told: impl Iterator<Item = (NodeId, Revision)>) -> Result<(), String> {
    for (node, revision) in told {
        if view.roster.node(&node).is_none_or(|present| present.modified < revision) {
            return Err(format!("the watch told the leader of {node} at {revision}, and the leader does not know it"));
        }
    }
    Ok(())
}
