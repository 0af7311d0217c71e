//! Nodes that may not take part: drained ones, and those that claim another's name or place.

use super::{Eviction, Evictions, MOST_EVICTIONS, Verdict, by_operator, eviction, names};
use crate::job::{Fate, NodeId, NodeRecord};
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
    refuse(there.map(by_operator), |there| format!("the operator evicted {there}"))
}

/// Nodes that the operator drains end once they have no place, neither in this round nor in the next.
fn dismissals(view: &View) -> Option<(Verdict, String)> {
    let reason = "the operator drains this node: `elasticctl undrain` lets it take part again";
    let drained = view.drained_newcomers().map(|node| Eviction { drained: true, ..refusal(node, reason) });
    refuse(drained, |drained| format!("{drained} has left: drained by the operator"))
}

/// Turns away as many of these nodes as one transaction takes, if there are any. `tells` of them by their names.
fn refuse(all: impl Iterator<Item = Eviction>, tells: impl Fn(String) -> String) -> Option<(Verdict, String)> {
    let mut refused = Evictions::default();
    all.take(MOST_EVICTIONS).for_each(|eviction| refused.add(eviction));
    let refused = refused.list();
    let nodes: Vec<&NodeId> = refused.iter().map(|eviction| &eviction.node).collect();
    let reason = tells(names(&nodes));
    (!refused.is_empty()).then_some((Verdict::Refuse(refused), reason))
}

/// Nodes that claim a node rank which another node has.
fn contested_places(view: &View) -> Option<(Verdict, String)> {
    let roster = &view.roster;
    let claimants = roster.contested().flat_map(|place| roster.claiming(place));
    let elsewhere = |a: &NodeRecord, b: &NodeRecord| a.name != b.name || a.machine != b.machine;
    let (node, record, holder) = clash(
        view,
        claimants,
        |record| record.place.map(|place| roster.claiming(place)).into_iter().flatten(),
        elsewhere,
    )?;
    let reason = format!(
        "node rank {} is claimed by {} on {} and by {}: give each node its own --node-rank",
        record.place?,
        holder.name,
        holder.host,
        node.name()
    );
    Some((Verdict::Refuse(vec![refusal(node, &reason)]), reason))
}

/// Nodes that bear another machine's node name: two machines would pass for one.
fn clashes(view: &View) -> Option<(Verdict, String)> {
    let roster = &view.roster;
    let bearers = roster.shared_names().flat_map(|name| roster.named(name));
    let elsewhere = |a: &NodeRecord, b: &NodeRecord| a.name == b.name && a.machine != b.machine;
    let (node, _, holder) = clash(view, bearers, |record| roster.named(&record.name), elsewhere)?;
    let reason =
        format!("the node name {} is taken by {}: give each node its own --node-name", holder.name, holder.host);
    Some((Verdict::Refuse(vec![refusal(node, &reason)]), reason))
}

/// The first newcomer among `nodes` that wants what an older node has, and both records. `others` are nodes that want the
/// same, and `clashes` says which of them cannot be the same node.
fn clash<'a, Others: Iterator<Item = &'a NodeId>>(
    view: &'a View,
    nodes: impl Iterator<Item = &'a NodeId>,
    others: impl Fn(&'a NodeRecord) -> Others,
    clashes: impl Fn(&NodeRecord, &NodeRecord) -> bool,
) -> Option<(&'a NodeId, &'a NodeRecord, &'a NodeRecord)> {
    latecomers(view, nodes).into_iter().find_map(|(node, present)| {
        let older = |holder: &&Present| holder.created < present.created && clashes(&holder.record, &present.record);
        let rivals = others(&present.record).filter(|other| *other != node && !view.confirmed_dead(other));
        let holder = rivals.filter_map(|other| view.roster.node(other)).find(older)?;
        Some((node, &present.record, &holder.record))
    })
}

/// Those of `nodes` that are newcomers, in the order in which they came.
fn latecomers<'a>(view: &'a View, nodes: impl Iterator<Item = &'a NodeId>) -> Vec<(&'a NodeId, &'a Present)> {
    let newcomers = nodes.filter(|node| view.roster.is_placeless(node) && !view.confirmed_dead(node));
    let mut newcomers: Vec<_> = newcomers.filter_map(|node| Some((node, view.roster.node(node)?))).collect();
    newcomers.sort_by_key(|(node, present)| (present.created, *node));
    newcomers
}
