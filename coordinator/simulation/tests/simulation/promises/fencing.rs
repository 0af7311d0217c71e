//! Promise 3: a node outside the round can commit nothing.

use elastic_rendezvous::Credentials;
use elastic_rendezvous::job::{Keys, RoundRecord, Versioned};
use elastic_store::{Guard, Op, Revision, Txn};

/// Whatever a leader writes is guarded by its term and by the round as it last read it. The round's guard alone hides
/// the lack of the term's from any schedule, so the test checks each transaction. Its own key it may delete whatever the
/// round is: it resigns.
pub(super) fn guarded(keys: &Keys, term: Revision, txn: &Txn) -> Result<(), String> {
    let by_term = txn.when.contains(&Guard::modified(keys.leader(), term));
    let by_round = txn.when.iter().any(|guard| matches!(guard, Guard::Modified { key, .. } if *key == keys.round()));
    let resigns = txn.then == [Op::delete(keys.leader())];
    if txn.is_write() && !(by_term && (by_round || resigns)) {
        return Err(format!("a leader of term {term} writes without its guards: {txn:?}"));
    }
    Ok(())
}

pub(super) fn committed(by: &Credentials, evicted: bool, round: Option<&Versioned<RoundRecord>>) -> Result<(), String> {
    if evicted {
        return Err(format!("{} committed after its eviction", by.node));
    }
    let sealed = round.and_then(|round| round.value.sealed).map(|sealed| sealed.number);
    if sealed != Some(by.round) || round.is_some_and(|round| round.value.state.is_final()) {
        return Err(format!("{} committed as a member of round {} during {round:?}", by.node, by.round));
    }
    Ok(())
}
