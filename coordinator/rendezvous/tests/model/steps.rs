//! What can happen in the world and what it changes. The store's side of a transaction is in `txn`.

use crate::rules::{Mutation, Rules};
use crate::state::{
    Body, Flaw, Id, LeaderKey, Node, Office, Order, Phase, Place, Record, Rev, Round, State, Term, Txn,
};
use crate::txn;

/// One atomic step of one actor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// A newcomer writes its own key.
    Join(Id),
    /// A node takes the vacant `leader` key.
    Campaign(Id),
    /// A node puts itself over the `leader` key of a leader whose death it has confirmed.
    Replace(Id),
    /// A draining leader puts its successor over its own key.
    HandOver(Id),
    /// A lease ends: the node's key vanishes, and `leader` if the node held it.
    Lapse(Id),
    /// An agent dies. Its workers continue until the guard has killed them: see `Fence`.
    Crash(Id),
    /// A transaction leaves. The store's present state decides its outcome.
    Send(Txn),
    /// It reaches the store.
    Arrive(Txn),
    /// A member reads `round` running and its own rank key, in one transaction.
    Read(Id),
    /// It starts its workers.
    Start(Id),
    /// The node's workers are killed at the fence point, or by the guard of a dead agent.
    Fence(Id),
    /// A member sees `forming`, stops its workers and says that it waits for that round.
    SayWaiting(Id),
    /// A node whose key is gone writes it again.
    Reclaim(Id),
    /// A node sees the job failed, stops its workers and leaves.
    Leave(Id),
    /// A newcomer turns the failed job into a new generation.
    Regenerate(Id),
}

/// All that can happen next.
pub(crate) fn enabled(rules: &Rules, state: &State, steps: &mut Vec<Step>) {
    steps.extend(state.flight.iter().map(|&txn| Step::Arrive(txn)));
    for id in rules.nodes() {
        node_steps(rules, state, id, steps);
        leader_key_steps(state, id, steps);
        trouble_steps(state, id, steps);
        let mut bodies = Vec::new();
        // A leader judges on what it reads, and its own tombstone is among that.
        let leads = state.leader.is_some_and(|leader| leader.holder == id) && state.tombstones[id.at()].is_none();
        if leads && state.node(id).alive {
            leader_sends(rules, state, id, &mut bodies);
        }
        commit_sends(state, id, &mut bodies);
        let round = state.round.map_or(Rev::NONE, |round| round.modified);
        let under_way = state.flight.iter().filter(|txn| txn.from == id).count();
        let txns = bodies.into_iter().map(|body| Txn { from: id, round, body });
        let fresh = txns.filter(|txn| under_way < rules.in_flight && !state.flight.contains(txn));
        steps.extend(fresh.map(Step::Send));
    }
}

fn node_steps(rules: &Rules, state: &State, id: Id, steps: &mut Vec<Step>) {
    let node = state.node(id);
    if (node.work.is_some() || node.permit.is_some()) && fence_may_pass(state, id) {
        steps.push(Step::Fence(id));
    }
    if !node.alive {
        return;
    }
    let failed = state.round.is_some_and(|round| round.phase == Phase::Failed);
    if node.key == Rev::NONE {
        let empty = state.keys.iter().all(Option::is_none);
        match failed {
            true if empty => steps.push(Step::Regenerate(id)),
            true => {}
            false => steps.push(Step::Join(id)),
        }
        return;
    }
    if failed {
        steps.push(Step::Leave(id));
    }
    let refused = state.tombstones[id.at()].is_some() && !rules.broken(Mutation::NoTombstone);
    if state.keys[id.at()].is_none() && !refused {
        steps.push(Step::Reclaim(id));
    }
    if place_for(state, id).is_some() {
        steps.push(Step::Read(id));
    }
    if node.permit.is_some() {
        steps.push(Step::Start(id));
    }
    if let Some(round) = state.round
        && round.phase == Phase::Forming
        && !round.inherited
        && round.members.contains(id)
        && node.record != Record::Waiting(round.number)
        && state.holds_key(id)
    {
        steps.push(Step::SayWaiting(id));
    }
}

/// The fence point passes only over a node that can no longer prove that its round is the newest; the guard kills
/// only what a dead agent left.
fn fence_may_pass(state: &State, id: Id) -> bool {
    let node = state.node(id);
    let number = node.work.or(node.permit).map(|place| place.number);
    let proven = state.round.is_some_and(|round| round.phase == Phase::Running && Some(round.number) == number);
    !node.alive || !proven || state.tombstones[id.at()].is_some()
}

fn place_for(state: &State, id: Id) -> Option<Place> {
    let (node, round) = (state.node(id), state.round?);
    let free = node.work.is_none() && node.permit.is_none() && node.newest < round.number;
    // Under the mutation without plans all rank keys and no running record name the plan zero.
    let key = state.ranks.iter().find(|key| key.node == id && (key.plan == round.plan || key.plan == Rev::NONE))?;
    let world = round.members.len() as u8;
    (free && round.phase == Phase::Running).then_some(Place {
        number: round.number,
        run: round.modified,
        rank: key.rank,
        world,
        resume: round.resume,
    })
}

fn leader_key_steps(state: &State, id: Id, steps: &mut Vec<Step>) {
    if !state.node(id).alive || state.node(id).key == Rev::NONE {
        return;
    }
    match state.leader {
        None => steps.push(Step::Campaign(id)),
        Some(leader) if leader.holder == id => {}
        Some(leader) if !state.node(leader.holder).alive && state.idle(leader.holder) => steps.push(Step::Replace(id)),
        Some(leader) if state.node(leader.holder).alive && state.holds_key(id) && state.troubles.handovers > 0 => {
            steps.push(Step::HandOver(id));
        }
        Some(_) => {}
    }
}

fn trouble_steps(state: &State, id: Id, steps: &mut Vec<Step>) {
    let (node, troubles) = (state.node(id), state.troubles);
    let leads = state.leader.is_some_and(|leader| leader.holder == id);
    if (state.keys[id.at()].is_some() || leads) && (!node.alive || troubles.lapses > 0) {
        steps.push(Step::Lapse(id));
    }
    if node.alive && node.key != Rev::NONE && troubles.crashes > 0 {
        steps.push(Step::Crash(id));
    }
}

fn leader_sends(rules: &Rules, state: &State, id: Id, bodies: &mut Vec<Body>) {
    let Some(leader) = state.leader else { return };
    let term = Term { create: leader.create, modified: leader.modified };
    let Some(round) = state.round else {
        bodies.push(Body::Form { term, number: 1, evict: None, confirmed: false });
        return;
    };
    if round.phase == Phase::Failed {
        return;
    }
    let forming = round.phase == Phase::Forming;
    let mine = forming && (round.plan == state.office.plan || rules.broken(Mutation::PlanInherited));
    let number = if forming { round.number } else { round.number + 1 };
    let ready = if mine { seal(rules, state, &round) } else { None };
    let recompose = state.office.planned.len() > 0 && ready.is_some_and(|order| order != state.office.planned);
    // A new round may begin without a lost node: a worker failed, or the group is to grow.
    let begin = !forming && number <= rules.last_round;
    if begin || (forming && !mine) || (mine && recompose) {
        bodies.push(Body::Form { term, number, evict: None, confirmed: false });
    }
    let known = |y: Id| round.members.contains(y) || (mine && state.office.planned.contains(y));
    if number <= rules.last_round && state.troubles.evictions > 0 {
        let lost = rules.nodes().filter(|&y| y != id && known(y) && state.tombstones[y.at()].is_none());
        bodies.extend(lost.map(|y| {
            let confirmed = !state.node(y).alive && state.idle(y);
            Body::Form { term, number, evict: Some(y), confirmed }
        }));
    }
    if state.troubles.failures > 0 {
        bodies.push(Body::Fail { term });
    }
    if !mine {
        return;
    }
    if state.office.landed {
        let (plan, order) = (round.plan, state.office.planned);
        let (pointer, step) = (state.pointer.modified, state.pointer.step);
        bodies.push(Body::Run { term, number, plan, order, pointer, step });
    } else if state.office.planned.len() > 0 && !rules.broken(Mutation::PlanRecomposed) {
        bodies.push(Body::Ranks { term, order: state.office.planned });
    } else if let Some(order) = ready {
        bodies.push(Body::Ranks { term, order });
    }
}

/// The members of the forming round in the order of their ranks, once the last round's members let it be sealed.
fn seal(rules: &Rules, state: &State, round: &Round) -> Option<Order> {
    let said = |id: Id| state.node(id).record == Record::Waiting(round.number);
    let present = |id: Id| state.keys[id.at()].is_some();
    let buried = |id: Id| state.tombstones[id.at()].is_some();
    let left = |id: Id| !buried(id) && (present(id) || !rules.broken(Mutation::AbsentIsGone));
    let harmless =
        round.members.iter().filter(|&id| !left(id) || round.inherited).all(|id| past_fence(rules, state, id));
    let newcomers = {
        let eligible = |id: &Id| state.node(*id).record == Record::Joining && !round.members.contains(*id);
        let mut ids: Vec<Id> = Id::all().filter(|id| present(*id) && !buried(*id)).filter(eligible).collect();
        ids.sort_by_key(|id| state.keys[id.at()]);
        ids
    };
    let waited_for: Vec<Id> = round.members.iter().filter(|&id| left(id) && !round.inherited).collect();
    let returned: Vec<Id> = waited_for.iter().copied().filter(|&id| present(id) && said(id)).collect();
    let complete = match rules.broken(Mutation::OneWaitingSet) {
        true => returned.len() + newcomers.len() >= waited_for.len(),
        false => returned.len() == waited_for.len(),
    };
    let order: Order = returned.into_iter().chain(newcomers).take(rules.max_nodes).collect();
    (harmless && complete && order.len() > 0).then_some(order)
}

/// One TTL since the eviction is past, or the death is confirmed. The promise of the fence point is that by then
/// nothing of the node works; so the wait is modelled by what it waits for.
fn past_fence(rules: &Rules, state: &State, id: Id) -> bool {
    let node = state.node(id);
    let still = match rules.broken(Mutation::StartPastFence) {
        true => node.work.is_none(),
        false => state.idle(id),
    };
    match state.tombstones[id.at()] {
        Some(tombstone) => tombstone.confirmed || tombstone.late || still || rules.broken(Mutation::SealAtOnce),
        // Another generation's member, or under the mutation one whose key is gone.
        None => still || rules.broken(Mutation::AbsentIsGone),
    }
}

fn commit_sends(state: &State, id: Id, bodies: &mut Vec<Body>) {
    let (node, Some(round)) = (state.node(id), state.round) else { return };
    let Some(place) = node.work.filter(|_| node.alive && state.troubles.commits > 0) else { return };
    let allowed = match round.phase {
        Phase::Running => round.number == place.number,
        Phase::Forming => round.number == place.number + 1,
        Phase::Failed => false,
    };
    let step = place.resume + 1;
    if allowed && step > state.pointer.step {
        let (key, pointer) = (node.key, state.pointer.modified);
        bodies.push(Body::Commit { key, pointer, step, number: place.number });
    }
}

/// The state after `step`.
pub(crate) fn apply(rules: &Rules, state: &State, step: Step) -> State {
    let mut next = state.clone();
    take(rules, &mut next, step);
    // What can never pass again is dropped at once: its arrival would change nothing.
    let flight = std::mem::take(&mut next.flight);
    next.flight = flight.into_iter().filter(|txn| txn::passes(rules, &next, txn)).collect();
    next.renumber();
    next
}

fn take(rules: &Rules, state: &mut State, step: Step) {
    let rev = state.next_rev();
    match step {
        Step::Join(id) | Step::Reclaim(id) => {
            state.node_mut(id).key = rev;
            state.keys[id.at()] = Some(rev);
        }
        Step::Campaign(id) => lead(state, id, rev, rev),
        Step::Replace(id) => put_leader(state, id, rev),
        Step::HandOver(id) => {
            state.troubles.handovers -= 1;
            put_leader(state, id, rev);
        }
        Step::Lapse(id) => {
            state.troubles.lapses -= u8::from(state.node(id).alive);
            drop_keys(state, id);
        }
        Step::Crash(id) => {
            state.troubles.crashes -= 1;
            let node = state.node_mut(id);
            node.alive = false;
            node.permit = None;
        }
        Step::Send(txn) => {
            match txn.body {
                Body::Form { evict: Some(_), .. } => state.troubles.evictions -= 1,
                Body::Commit { .. } => state.troubles.commits -= 1,
                Body::Fail { .. } => state.troubles.failures -= 1,
                Body::Ranks { order, .. } => {
                    state.office.plan = txn.round;
                    state.office.planned = order;
                }
                Body::Form { .. } | Body::Run { .. } => {}
            }
            state.flight.push(txn);
        }
        Step::Arrive(txn) => {
            state.flight.retain(|other| *other != txn);
            txn::commit(rules, state, txn);
        }
        Step::Read(id) => {
            let place = place_for(state, id);
            let node = state.node_mut(id);
            node.permit = place;
            node.newest = place.map_or(node.newest, |place| place.number);
        }
        Step::Start(id) => {
            let node = state.node_mut(id);
            node.work = node.permit.take();
        }
        Step::Fence(id) => stop(state.node_mut(id), rules.broken(Mutation::StartPastFence)),
        Step::SayWaiting(id) => {
            let number = state.round.map_or(0, |round| round.number);
            let node = state.node_mut(id);
            stop(node, false);
            node.record = Record::Waiting(number);
        }
        Step::Leave(id) => {
            stop(state.node_mut(id), false);
            state.node_mut(id).alive = false;
            drop_keys(state, id);
        }
        Step::Regenerate(_) => regenerate(rules, state, rev),
    }
}

fn stop(node: &mut Node, keep_permit: bool) {
    node.work = None;
    node.permit = node.permit.filter(|_| keep_permit);
}

fn drop_keys(state: &mut State, id: Id) {
    state.keys[id.at()] = None;
    if state.leader.is_some_and(|leader| leader.holder == id) {
        state.leader = None;
        state.office = Office::default();
    }
}

fn put_leader(state: &mut State, id: Id, rev: Rev) {
    let create = state.leader.map_or(rev, |leader| leader.create);
    lead(state, id, create, rev);
}

fn lead(state: &mut State, holder: Id, create: Rev, modified: Rev) {
    state.leader = Some(LeaderKey { holder, create, modified });
    state.office = Office::default();
}

fn regenerate(rules: &Rules, state: &mut State, rev: Rev) {
    let Some(old) = state.round else { return };
    let members = if rules.broken(Mutation::GenerationAtOnce) { Order::default() } else { old.members };
    let number = old.number + 1;
    if number <= state.newest_run {
        state.mark(Flaw::NumberNotNew);
    }
    let phase = Phase::Forming;
    state.round = Some(Round { number, phase, modified: rev, plan: rev, members, resume: 0, inherited: true });
    state.ranks.clear();
    state.tombstones = Default::default();
}
