//! Nodes that may not take part: drained ones, and those that claim another's name or place.

use super::{Eviction, MOST_EVICTIONS, Verdict, by_operator, eviction, names};
use crate::job::{Fate, NodeId};
use crate::roster::Present;
use crate::view::View;

/// Nodes that may not take part.
pub(super) fn refusals(view: &View) -> Option<(Verdict, String)> {
    evicted(view).or_else(|| dismissals(view)).or_else(|| clashes(view)).or_else(|| contested_places(view))
}

/// Turns a node away that has no place. It has none as far as this leader knows. A later leader may find that it is a
/// member, so its tombstone proves nothing about its workers.
fn refusal(node: &NodeId, reason: &str) -> Eviction {
    Eviction { refused: true, ..eviction(node, Fate::Unknown, reason) }
}

/// Nodes without a place that the operator evicts.
fn evicted(view: &View) -> Option<(Verdict, String)> {
    let there = view.evicted_by_operator().filter(|node| view.roster.is_placeless(node));
    let there: Vec<&NodeId> = there.take(MOST_EVICTIONS).collect();
    let evictions: Vec<Eviction> = there.iter().map(|node| by_operator(node)).collect();
    (!there.is_empty()).then(|| (Verdict::Refuse(evictions), format!("the operator evicted {}", names(&there))))
}

/// Nodes that the operator drains end once they have no place, neither in this round nor in the next.
fn dismissals(view: &View) -> Option<(Verdict, String)> {
    let drained: Vec<&NodeId> = view.drained_newcomers().take(MOST_EVICTIONS).collect();
    if drained.is_empty() {
        return None;
    }
    let reason = "the operator drains this node: `elasticctl undrain` lets it take part again";
    let evictions = drained.iter().map(|node| Eviction { drained: true, ..refusal(node, reason) });
    Some((Verdict::Refuse(evictions.collect()), format!("{} has left: drained by the operator", names(&drained))))
}

/// Nodes that claim a node rank which another node has.
fn contested_places(view: &View) -> Option<(Verdict, String)> {
    let roster = &view.roster;
    let claimants = roster.contested().iter().flat_map(|place| roster.claiming(*place));
    let (node, holder, place) = latecomers(view, claimants).into_iter().find_map(|(node, present)| {
        let record = &present.record;
        let place = record.place?;
        let holds = |other: &&NodeId| {
            roster.node(other).is_some_and(|holder| {
                let same = holder.record.name == record.name && holder.record.machine == record.machine;
                holder.created < present.created && !same && !view.confirmed_dead(other)
            })
        };
        let holder = roster.claiming(place).filter(|other| *other != node).find(holds)?;
        Some((node, &roster.node(holder)?.record, place))
    })?;
    let reason = format!(
        "node rank {place} is claimed by {} on {} and by {}: give each node its own --node-rank",
        holder.name,
        holder.host,
        node.name()
    );
    Some((Verdict::Refuse(vec![refusal(node, &reason)]), reason))
}

/// Nodes that bear another machine's node name: two machines would pass for one.
fn clashes(view: &View) -> Option<(Verdict, String)> {
    let roster = &view.roster;
    let bearers = roster.shared_names().iter().flat_map(|name| roster.named(name));
    let (node, holder) = latecomers(view, bearers).into_iter().find_map(|(node, present)| {
        let record = &present.record;
        let bears = |other: &&NodeId| {
            roster.node(other).is_some_and(|holder| {
                let other_machine = holder.record.name == record.name && holder.record.machine != record.machine;
                holder.created < present.created && other_machine && !view.confirmed_dead(other)
            })
        };
        let holder = roster.named(&record.name).filter(|other| *other != node).find(bears)?;
        Some((node, &roster.node(holder)?.record))
    })?;
    let reason =
        format!("the node name {} is taken by {}: give each node its own --node-name", holder.name, holder.host);
    Some((Verdict::Refuse(vec![refusal(node, &reason)]), reason))
}

/// Those of `nodes` that are newcomers, in the order in which they came.
fn latecomers<'a>(view: &'a View, nodes: impl Iterator<Item = &'a NodeId>) -> Vec<(&'a NodeId, &'a Present)> {
    let newcomers = nodes.filter(|node| view.roster.is_placeless(node) && !view.confirmed_dead(node));
    let mut newcomers: Vec<_> = newcomers.filter_map(|node| Some((node, view.roster.node(node)?))).collect();
    newcomers.sort_by_key(|(node, present)| (present.created, *node));
    newcomers
}
