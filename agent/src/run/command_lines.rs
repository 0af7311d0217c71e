//! Warns where the nodes of a job were started with different programs or arguments: then training goes wrong in ways
//! that no error names.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use elastic_rendezvous::job::{Keys, NodeRecord, Versioned};
use elastic_store::Store;

/// The comparison of this node's command line with the others'.
pub(super) struct CommandLines {
    own: NodeRecord,
    said: Arc<AtomicBool>,
}

impl CommandLines {
    /// Those of a job whose node this is.
    pub(super) fn of(own: NodeRecord) -> CommandLines {
        CommandLines { own, said: Arc::default() }
    }

    /// Reads the records of the nodes that are here, and warns once in this agent's life. One node of a round is enough
    /// to do this. Without an answer of the store nothing is said.
    pub(super) fn compare(&self, store: &Arc<dyn Store>, keys: &Keys) {
        if self.said.load(Ordering::Relaxed) {
            return;
        }
        let (store, nodes) = (Arc::clone(store), keys.nodes());
        let (own, said) = (self.own.clone(), Arc::clone(&self.said));
        tokio::spawn(async move {
            let Ok((found, _)) = store.range(&nodes).await else { return };
            let records = found.iter().filter_map(|kv| Versioned::<NodeRecord>::parse(kv).ok());
            if let Some(warning) = others(&own, records.map(|record| record.value))
                && !said.swap(true, Ordering::Relaxed)
            {
                tracing::warn!("{warning}");
            }
        });
    }
}

/// What to say of nodes that run another command line than `own`. Nodes whose records do not name one are left out.
fn others(own: &NodeRecord, records: impl Iterator<Item = NodeRecord>) -> Option<String> {
    const SHOWN: usize = 5;
    let differs = |record: &NodeRecord| record.command.is_some() && record.command != own.command;
    let names: Vec<String> = records.filter(differs).map(|record| record.name).collect();
    let more = names.len().saturating_sub(SHOWN);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let shown = names.get(..names.len().min(SHOWN)).filter(|names| !names.is_empty())?.join(", ");
    Some(format!(
        "{shown}{more}: another program or other arguments than on this node, {}; start all nodes of a job with the same \
         command line",
        own.name
    ))
}

#[cfg(test)]
mod tests {
    use elastic_rendezvous::job::samples;

    use super::*;

    fn node(name: &str, command: Option<&str>) -> NodeRecord {
        NodeRecord { command: command.map(str::to_owned), ..samples::node(name) }
    }

    #[test]
    fn nodes_that_run_something_else_are_named_but_not_all_of_many() {
        let own = node("a", Some("1"));
        assert_eq!(others(&own, [own.clone(), node("b", Some("1")), node("c", None)].into_iter()), None);
        let warning = others(&own, [own.clone(), node("b", Some("2"))].into_iter()).unwrap();
        assert!(warning.starts_with("b: another program or other arguments than on this node, a;"), "{warning}");
        let warning = others(&own, (0..7).map(|at| node(&format!("n{at}"), Some("2")))).unwrap();
        assert!(warning.starts_with("n0, n1, n2, n3, n4 and 2 more: "), "{warning}");
    }
}
