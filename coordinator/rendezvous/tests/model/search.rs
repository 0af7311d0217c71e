//! Searching a model whole, or for its shortest way to a breach.

// The printed counts and paths are what people run these tests for.
#![allow(clippy::print_stdout, clippy::panic)]

use std::fmt::Debug;
use std::hash::Hash;

use stateright::{Checker, HasDiscoveries, Model};

/// Searches the whole space of `model`: no property may be breached, and each of `reached` must come true somewhere,
/// else the model would show nothing.
#[track_caller]
pub(crate) fn holds<M>(name: &str, model: M, reached: &[&'static str])
where
    M: Model + Clone + Send + Sync + 'static,
    M::State: Clone + PartialEq + Hash + Send + Sync + 'static,
    M::Action: Clone + PartialEq + Debug,
{
    let checker = model.clone().checker().threads(2).spawn_dfs().join();
    println!("{name}: {} states, {} transitions", checker.unique_state_count(), checker.state_count());
    for property in model.properties().iter().filter(|p| p.expectation.discovery_is_failure()) {
        if checker.discovery(property.name).is_some() {
            breaks(name, model.clone(), property.name);
            panic!("{name}: breached: {}", property.name);
        }
    }
    for name in reached {
        assert!(checker.discovery(name).is_some(), "never reached: {name}");
    }
}

/// Searches `model` for a breach of `property`, which must be there, and prints the shortest path to one.
#[track_caller]
pub(crate) fn breaks<M>(name: &str, model: M, property: &'static str)
where
    M: Model + Clone + Send + Sync + 'static,
    M::State: Clone + PartialEq + Hash + Send + Sync + 'static,
    M::Action: Clone + PartialEq + Debug,
{
    let mut shortest: Option<Vec<M::Action>> = None;
    // The checker looks at many states between two looks at what it found, and keeps the last find: so search again
    // for a shorter one until there is none.
    loop {
        let depth = shortest.as_ref().map_or(0, |path| path.len() + 1);
        let checker = model.clone().checker().finish_when(HasDiscoveries::AnyOf([property].into()));
        let checker = checker.target_max_depth(depth).spawn_bfs().join();
        let Some(path) = checker.discovery(property) else { break };
        shortest = Some(path.into_actions());
    }
    let Some(path) = shortest else { panic!("{name} should breach: {property}") };
    println!("{name} breaches: {property}");
    for (number, action) in path.iter().enumerate() {
        println!("{:>4}. {}", number + 1, model.format_action(action));
    }
}
