//! etcd's refusals in words that help: it says neither whom it refuses nor what for, so both are added here, with what to
//! do about it.

use crate::{Guard, Op, Scope, StoreError, Txn};

/// So many keys of each kind are named.
const NAMED: usize = 3;

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Rights {
    read: Vec<String>,
    write: Vec<String>,
}

impl Rights {
    /// Those of a transaction. etcd asks for those of both branches, and for reading what is compared.
    pub(super) fn of_txn(txn: &Txn) -> Rights {
        let mut rights = Rights::default();
        for guard in &txn.when {
            match guard {
                Guard::Created { key, .. } | Guard::Modified { key, .. } => rights.reads(key.clone()),
                Guard::Empty(prefix) => rights.reads(all(prefix)),
            }
        }
        for op in txn.then.iter().chain(&txn.otherwise) {
            match op {
                Op::Get(key) => rights.reads(key.clone()),
                Op::Range(prefix) | Op::Last(prefix) | Op::Count(prefix) => rights.reads(all(prefix)),
                Op::Put { key, .. } | Op::Delete(key) => rights.writes(key.clone()),
                Op::DeletePrefix(prefix) => rights.writes(all(prefix)),
            }
        }
        rights
    }

    pub(super) fn of_watch(scope: &Scope) -> Rights {
        let read = match scope {
            Scope::Key(key) => key.clone(),
            Scope::Prefix(prefix) => all(prefix),
        };
        Rights { read: vec![read], write: Vec::new() }
    }

    /// Those of a renewal: some releases of etcd ask for them.
    pub(super) fn of_lease() -> Rights {
        Rights { read: Vec::new(), write: vec!["the keys of its lease".to_owned()] }
    }

    fn reads(&mut self, key: String) {
        if !self.read.contains(&key) {
            self.read.push(key);
        }
    }

    fn writes(&mut self, key: String) {
        if !self.write.contains(&key) {
            self.write.push(key);
        }
    }

    /// For people; what is written first, since that is what most users may not.
    fn told(&self) -> String {
        let write = (!self.write.is_empty()).then(|| format!("to write {}", listing(&self.write)));
        let read = (!self.read.is_empty()).then(|| format!("to read {}", listing(&self.read)));
        write.into_iter().chain(read).collect::<Vec<_>>().join(", and ")
    }
}

/// All keys with a prefix, as etcd's users know them.
fn all(prefix: &str) -> String {
    format!("{prefix}*")
}

fn listing(keys: &[String]) -> String {
    let named = keys.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>().join(", ");
    match keys.len().saturating_sub(NAMED) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}

/// A refusal with the user and the rights in it; any other error unchanged.
pub(super) fn told(error: StoreError, who: &str, rights: &Rights) -> StoreError {
    let StoreError::Denied { endpoints, cause } = error else { return error };
    let cause = if cause.contains("permission denied") {
        format!(
            "permission denied for {who}, who needs the right {}. Take a user who has it, or grant it to a role of this \
             one (etcdctl role grant-permission)",
            rights.told()
        )
    } else if cause.contains("user name is empty") {
        format!("it has users, and none is given ({cause}): name one, and the file with its password")
    } else {
        format!("{cause} ({who})")
    };
    StoreError::Denied { endpoints, cause }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Revision;

    fn denied(cause: &str) -> StoreError {
        StoreError::Denied { endpoints: "e".into(), cause: cause.into() }
    }

    #[test]
    fn a_refusal_names_who_what_for_and_what_to_do() {
        let ask = Txn::of([Op::put("/j/desired", "{}"), Op::put("/j/events/1", "{}"), Op::delete("/j/events/0")])
            .guarded([Guard::modified("/j/desired", Revision(4)), Guard::absent("/j/events/1")]);
        let look = Txn::of([Op::range("/jobs/"), Op::last("/jobs/")]);
        let begin = Txn::of(["a", "b", "c", "d", "e"].map(Op::get)).or_else([Op::delete_prefix("/j/")]);
        let watch = Scope::Prefix("/j/nodes/".into());
        for (rights, expected) in [
            (
                Rights::of_txn(&ask),
                "to write /j/desired, /j/events/1, /j/events/0, and to read /j/desired, /j/events/1.",
            ),
            (Rights::of_txn(&look), "the right to read /jobs/*."),
            (Rights::of_txn(&begin), "to write /j/*, and to read a, b, c and 2 more."),
            (Rights::of_watch(&watch), "to read /j/nodes/*."),
        ] {
            let text = told(denied("etcdserver: permission denied"), r#"user "anna""#, &rights).to_string();
            assert!(text.contains(expected) && text.contains("\"anna\""), "{text}");
            assert!(text.contains("grant-permission"), "{text}");
        }
    }

    #[test]
    fn a_user_without_access_gets_that_message() {
        let anna = r#"user "anna""#;
        let text = |cause, who| told(denied(cause), who, &Rights::default()).to_string();
        assert!(text("etcdserver: user name is empty", "no user").contains("none is given"));
        let wrong = text("etcdserver: authentication failed, invalid user ID or password", anna);
        assert!(wrong.contains("password (user \"anna\")"), "{wrong}");
        assert_eq!(told(StoreError::LeaseGone, anna, &Rights::default()), StoreError::LeaseGone);
    }
}
