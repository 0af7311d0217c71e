//! What members of a version tell each other before they start their workers: who has how many, which ranks these get,
//! and where rank 0 listens. As torch 2.15's agents do it, through the version's key-value store.

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::view::Files;
use elastic_rendezvous::job::Endpoint;

const MASTER_ADDR: &str = "MASTER_ADDR";
const MASTER_PORT: &str = "MASTER_PORT";
/// How many agents have come to the exit barrier.
pub(super) const DONE_COUNT: &str = "torchelastic/agent/terminal_state/num_members";
/// Written by the last of them.
pub(super) const ALL_DONE: &str = "torchelastic/agent/terminal_state/last_member";
/// What torchrun writes where only the key matters.
pub(super) const IGNORED: &str = "<val_ignored>";
/// Where agents before this exchange came into being tell the same: without the last slash.
const OLD_ROLE_INFO: &str = "torchelastic/role_info";

fn role_info(rank: u32) -> String {
    format!("torchelastic/role_info/{rank}")
}

fn assigned_ranks(rank: u32) -> String {
    format!("torchelastic/assigned_ranks/{rank}")
}

#[derive(Serialize, Deserialize)]
struct RoleInfo {
    role: String,
    rank: u32,
    local_world_size: u32,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Own<'a> {
    pub(super) role: &'a str,
    pub(super) rank: u32,
    pub(super) slots: u32,
    /// Where rank 0 would listen here.
    pub(super) master: Option<&'a Endpoint>,
    /// All nodes are alike, and know it: no ranks are exchanged.
    pub(super) identical: bool,
}

impl Own<'_> {
    /// What a node of this rank tells that brings the same.
    fn info(self, rank: u32) -> String {
        let info = RoleInfo { role: self.role.to_owned(), rank, local_world_size: self.slots };
        serde_json::to_string(&info).unwrap_or_default()
    }
}

/// The place of a node's workers among all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ranks {
    pub(super) first_rank: u32,
    pub(super) world_size: u32,
    pub(super) role_rank_base: u32,
    pub(super) role_world_size: u32,
    pub(super) master: Endpoint,
}

/// The next thing that this node has to tell, if there is one: a key and its value.
pub(super) fn to_tell(files: &Files, own: Own<'_>, size: u32) -> Option<(String, String)> {
    let missing = |key: &str| files.kv_raw(key).is_none();
    if own.rank == 0
        && let Some(master) = own.master
    {
        if missing(MASTER_ADDR) {
            return Some((MASTER_ADDR.into(), master.host.clone()));
        }
        if missing(MASTER_PORT) {
            return Some((MASTER_PORT.into(), master.port.to_string()));
        }
    }
    if own.identical {
        return None;
    }
    let key = role_info(own.rank);
    if missing(&key) {
        return Some((key, own.info(own.rank)));
    }
    if own.rank > 0 {
        return None;
    }
    let next = (0..size).find(|rank| missing(&assigned_ranks(*rank)))?;
    let assigned = assign(files, size)?;
    let value = serde_json::to_string(&assigned[next as usize]).unwrap_or_default();
    Some((assigned_ranks(next), value))
}

/// First rank, world size, first rank within the role, size of the role: for each group rank, once all have told.
fn assign(files: &Files, size: u32) -> Option<Vec<[u32; 4]>> {
    let infos: Vec<RoleInfo> =
        (0..size).map(|rank| serde_json::from_str(&files.kv(&role_info(rank))?).ok()).collect::<Option<_>>()?;
    let mut roles: BTreeMap<&str, u32> = BTreeMap::new();
    for info in &infos {
        *roles.entry(&info.role).or_default() += info.local_world_size;
    }
    let world_size: u32 = infos.iter().map(|info| info.local_world_size).sum();
    let (mut first, mut firsts) = (0, BTreeMap::<&str, u32>::new());
    let mut places = Vec::new();
    for RoleInfo { role, local_world_size, .. } in &infos {
        let within = firsts.entry(role).or_default();
        places.push([first, world_size, *within, roles[role.as_str()]]);
        first += local_world_size;
        *within += local_world_size;
    }
    Some(places)
}

/// Where this node's workers belong, once that is known.
pub(super) fn ranks(files: &Files, own: Own<'_>, size: u32) -> Option<Ranks> {
    let host = files.kv(MASTER_ADDR)?;
    let port = files.kv(MASTER_PORT)?.parse().ok()?;
    let [first_rank, world_size, role_rank_base, role_world_size] = if own.identical {
        [own.rank * own.slots, size * own.slots, own.rank * own.slots, size * own.slots]
    } else {
        serde_json::from_str(&files.kv(&assigned_ranks(own.rank))?).ok()?
    };
    Some(Ranks { first_rank, world_size, role_rank_base, role_world_size, master: Endpoint { host, port } })
}

/// What members that wait still need when others have died: invented places, so that they start their workers, notice
/// that the round is over, and stop them.
pub(super) fn to_fill_in(files: &Files, own: Own<'_>, size: u32, dead: &[u32]) -> Option<(String, String)> {
    let missing = |key: &str| files.kv_raw(key).is_none();
    for rank in dead {
        let key = role_info(*rank);
        if missing(&key) && !own.identical {
            return Some((key, own.info(*rank)));
        }
    }
    if !dead.contains(&0) {
        return None;
    }
    let master = own.master?;
    to_tell(files, Own { rank: 0, master: Some(master), ..own }, size)
}

/// Whether everybody has all that it waits for.
pub(super) fn is_complete(files: &Files, identical: bool, size: u32) -> bool {
    let there = |key: &str| files.kv_raw(key).is_some();
    there(MASTER_PORT) && (identical || (0..size).all(|rank| there(&assigned_ranks(rank))))
}

/// The ranks that were not heard.
pub(super) fn silent(files: &Files, size: u32) -> Vec<u32> {
    (0..size).filter(|rank| files.kv_raw(&role_info(*rank)).is_none()).collect()
}

/// A member that exchanges ranks in the old way, by which ours would wait for ever.
pub(super) fn speaks_old(files: &Files, own: u32) -> Option<u32> {
    files.kv_keys().find_map(|key| key.strip_prefix(OLD_ROLE_INFO)?.parse().ok().filter(|rank| *rank != own))
}

/// What agents of the old exchange wait for from this node.
pub(super) fn to_tell_old(files: &Files, own: Own<'_>) -> Option<(String, String)> {
    let key = format!("{OLD_ROLE_INFO}{}", own.rank);
    files.kv_raw(&key).is_none().then(|| (key, own.info(own.rank)))
}

/// How many members have come to the exit barrier.
pub(super) fn done(files: &Files, size: u32) -> u32 {
    let counted = files.kv(DONE_COUNT).and_then(|count| count.parse().ok()).unwrap_or(0);
    let marked = (0..size).filter(|rank| files.kv_raw(&done_mark(*rank)).is_some()).count() as u32;
    marked.max(counted)
}

pub(super) fn all_done(files: &Files, size: u32) -> bool {
    files.kv_raw(ALL_DONE).is_some() || (0..size).all(|rank| files.kv_raw(&done_mark(rank)).is_some())
}

/// How members of ours say so among themselves: a counter would not bear an answer that is lost.
pub(super) fn done_mark(rank: u32) -> String {
    format!("torchelastic/agent/terminal_state/elastic_agent/{rank}")
}

#[cfg(test)]
mod tests {
    use super::super::keys::{Paths, kv_file, kv_value};
    use super::super::view::VersionView;
    use super::*;

    fn endpoint() -> Endpoint {
        Endpoint { host: "10.0.0.1".into(), port: 5000 }
    }

    fn empty() -> VersionView {
        let mut view = VersionView::new(Paths::new("/p", "J"));
        view.set_files("1", 1, None);
        view
    }

    fn tell(view: &mut VersionView, key: &str, value: &str) {
        view.set_file("1", &kv_file(key), Some(&kv_value(value)));
    }

    /// Lets every node tell what it has to, until no one has anything left.
    fn exchanged(nodes: &[(&str, u32)], identical: bool) -> (VersionView, Vec<Option<Ranks>>) {
        let (mut view, master) = (empty(), endpoint());
        let own = |rank: usize| {
            let (role, slots) = nodes[rank];
            Own { role, rank: rank as u32, slots, master: Some(&master), identical }
        };
        let size = nodes.len() as u32;
        while let Some((key, value)) =
            (0..nodes.len()).find_map(|rank| to_tell(view.files("1").unwrap(), own(rank), size))
        {
            tell(&mut view, &key, &value);
        }
        let seats = (0..nodes.len()).map(|rank| ranks(view.files("1").unwrap(), own(rank), size)).collect();
        (view, seats)
    }

    #[test]
    fn ranks_are_given_as_torchrun_gives_them() {
        let (view, seats) = exchanged(&[("trainer", 2), ("reader", 1), ("trainer", 3)], false);
        let places: Vec<_> = seats
            .iter()
            .flatten()
            .map(|seat| [seat.first_rank, seat.world_size, seat.role_rank_base, seat.role_world_size])
            .collect();
        assert_eq!(places, [[0, 6, 0, 5], [2, 6, 0, 1], [3, 6, 2, 5]]);
        assert!(seats.iter().flatten().all(|seat| seat.master == endpoint()));
        let files = view.files("1").unwrap();
        // As recorded from torch 2.15
        assert_eq!(files.kv("torchelastic/assigned_ranks/2").as_deref(), Some("[3,6,2,5]"));
        let info: serde_json::Value = serde_json::from_str(&files.kv("torchelastic/role_info/1").unwrap()).unwrap();
        assert_eq!(info, serde_json::json!({"role": "reader", "rank": 1, "local_world_size": 1}));
    }

    #[test]
    fn nodes_that_are_alike_exchange_no_ranks() {
        let (view, seats) = exchanged(&[("a", 2), ("a", 2)], true);
        assert_eq!(view.files("1").unwrap().kv_keys().count(), 2);
        assert_eq!(seats[1].as_ref().map(|seat| (seat.first_rank, seat.world_size)), Some((2, 4)));
    }

    #[test]
    fn nothing_is_known_before_all_have_reported() {
        let (mut view, master) = (empty(), endpoint());
        let own = Own { role: "a", rank: 0, slots: 1, master: Some(&master), identical: false };
        for _ in 0..3 {
            let (key, value) = to_tell(view.files("1").unwrap(), own, 2).unwrap();
            tell(&mut view, &key, &value);
        }
        let files = view.files("1").unwrap();
        assert_eq!((to_tell(files, own, 2), ranks(files, own, 2), silent(files, 2)), (None, None, vec![1]));

        // Once the other is dead, its part is made up, so that anyone who waits for it continues
        let (key, value) = to_fill_in(files, own, 2, &[1]).unwrap();
        tell(&mut view, &key, &value);
        assert!(to_tell(view.files("1").unwrap(), own, 2).unwrap().0.contains("assigned_ranks/0"));
    }

    #[test]
    fn the_part_of_a_dead_rank_0_is_made_up() {
        let (mut view, master) = (empty(), endpoint());
        let own = Own { role: "a", rank: 1, slots: 1, master: Some(&master), identical: false };
        while let Some((key, value)) =
            to_fill_in(view.files("1").unwrap(), own, 2, &[0]).or_else(|| to_tell(view.files("1").unwrap(), own, 2))
        {
            tell(&mut view, &key, &value);
        }
        assert!(ranks(view.files("1").unwrap(), own, 2).is_some());
    }

    #[test]
    fn an_exchange_of_the_old_kind_is_known_by_its_keys() {
        let mut view = empty();
        tell(&mut view, "torchelastic/role_info/0", "{}");
        assert_eq!(speaks_old(view.files("1").unwrap(), 0), None);
        tell(&mut view, "torchelastic/role_info1", "{}");
        assert_eq!(speaks_old(view.files("1").unwrap(), 0), Some(1));
    }
}
