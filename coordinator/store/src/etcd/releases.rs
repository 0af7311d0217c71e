//! Which releases of etcd have faults that matter here, and what to do. The one home of this list: `elasticctl doctor`
//! reads it, and docs/operations.md shows it. The facts are those of etcd's change logs and of its code at each tag.

/// A fault of etcd, and the releases that fixed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReleaseFault {
    /// What goes wrong, for people.
    pub fault: &'static str,
    /// The first release that has it.
    since: Release,
    /// The first release without it in each line of releases that had it and got a fix, oldest line first.
    fixed: &'static [Release],
    /// It matters only where etcd has users.
    pub with_users: bool,
    /// What to do beside an upgrade; empty: nothing.
    pub advice: &'static str,
}

type Release = (u32, u32, u32);

const OLDEST: Release = (3, 4, 0);

const fn fault(fault: &'static str, fixed: &'static [Release]) -> ReleaseFault {
    ReleaseFault { fault, since: OLDEST, fixed, with_users: false, advice: "" }
}

/// All that are known, newest first.
pub const FAULTS: [ReleaseFault; 9] = [
    ReleaseFault {
        with_users: true,
        advice: "grant reads by prefix",
        ..fault("who may read one key can watch all later ones", &[(3, 5, 33), (3, 6, 14), (3, 7, 1)])
    },
    ReleaseFault { with_users: true, ..fault("any user can renew any lease", &[(3, 4, 42), (3, 5, 28), (3, 6, 9)]) },
    fault("a linearizable read can be stale after a pause", &[(3, 4, 42), (3, 5, 28), (3, 6, 9)]),
    ReleaseFault {
        since: (3, 5, 0),
        advice: "upgrade through 3.5.26",
        ..fault("removed members come back in 3.6", &[(3, 5, 26)])
    },
    fault("a renewal can succeed on a revoked lease", &[(3, 4, 38), (3, 5, 23), (3, 6, 5)]),
    fault("a watch opened at a compacted revision can miss a deletion", &[(3, 4, 36), (3, 5, 18)]),
    fault("an etcd leader that is stuck on its disk can revoke every lease", &[(3, 4, 31), (3, 5, 13)]),
    // Seen on 3.5.1, whose processors were all busy. 3.5.5 fixed it, and 3.5.7 another panic that came with that.
    fault("a read that its client gives up can end the server's process", &[(3, 4, 23), (3, 5, 7)]),
    ReleaseFault {
        since: (3, 5, 0),
        advice: "compare members by etcdctl endpoint hashkv",
        ..fault("a killed member can lose writes", &[(3, 5, 3)])
    },
];

impl ReleaseFault {
    /// The releases that fixed it, for people.
    pub fn fixed_in(&self) -> String {
        self.fixed.iter().copied().map(text).collect::<Vec<_>>().join(", ")
    }

    /// A line of releases that never fixed it has it, if it is older than one that did.
    fn is_in(&self, release: Release) -> bool {
        let own_line = self.fixed.iter().find(|fixed| line(**fixed) == line(release));
        release >= self.since && own_line.or(self.fixed.first()).is_some_and(|fixed| release < *fixed)
    }
}

fn line(release: Release) -> (u32, u32) {
    (release.0, release.1)
}

fn text((major, minor, patch): Release) -> String {
    format!("{major}.{minor}.{patch}")
}

/// The faults of a release, by its version as etcd tells it. `None`: that is no version of etcd's.
pub fn faults_of(version: &str) -> Option<Vec<&'static ReleaseFault>> {
    let release = parse(version)?;
    Some(FAULTS.iter().filter(|fault| fault.is_in(release)).collect())
}

/// The lowest release of the same line as `version` that has none of the faults; none: each has one. `users`: with
/// those that matter only where etcd has users.
pub fn lowest_fit(version: &str, users: bool) -> Option<String> {
    let (major, minor, _) = parse(version)?;
    let faults = || FAULTS.iter().filter(|fault| users || !fault.with_users);
    let fixed = faults().flat_map(|fault| fault.fixed).copied().filter(|fixed| line(*fixed) == (major, minor));
    let lowest = fixed.max().unwrap_or((major, minor, 0));
    (!faults().any(|fault| fault.is_in(lowest))).then(|| text(lowest))
}

/// `3.5.9`, `3.6.0-rc.1`, `3.6.9+embedded`. A pre-release has the faults of its release's predecessor at worst; it is
/// taken for its release.
fn parse(version: &str) -> Option<Release> {
    let plain = version.split(['-', '+']).next()?;
    let mut numbers = plain.split('.').map(|number| number.parse().ok());
    let release = (numbers.next()??, numbers.next()??, numbers.next()??);
    numbers.next().is_none().then_some(release)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_release_has_the_faults_that_were_fixed_after_it() {
        for (version, faults) in [
            ("3.4.22", 7),
            ("3.4.23", 6),
            ("3.4.42", 1),
            ("3.5.0", 9),
            ("3.5.2", 9),
            ("3.5.3", 8),
            ("3.5.7", 7),
            ("3.5.13", 6),
            ("3.5.18", 5),
            ("3.5.23", 4),
            ("3.5.26", 3),
            ("3.5.28", 1),
            ("3.5.33", 0),
            ("3.6.0", 4),
            ("3.6.0-rc.1", 4),
            ("3.6.5", 3),
            ("3.6.9", 1),
            ("3.6.14+embedded", 0),
            ("3.7.0", 1),
            ("3.7.1", 0),
            ("3.10.0", 0),
            ("4.0.0", 0),
        ] {
            assert_eq!(faults_of(version).map(|faults| faults.len()), Some(faults), "{version}");
        }
        for version in ["", "3", "3.5", "3.5.x", "3.5.1.2", "not decided"] {
            assert_eq!(faults_of(version), None, "{version}");
        }
    }

    #[test]
    fn each_line_has_a_lowest_release_that_is_fit_or_none() {
        for (version, alone, shared) in [
            ("3.4.1", Some("3.4.42"), None),
            ("3.5.1", Some("3.5.28"), Some("3.5.33")),
            ("3.6.1", Some("3.6.9"), Some("3.6.14")),
            ("3.7.0", Some("3.7.0"), Some("3.7.1")),
            ("3.8.2", Some("3.8.0"), Some("3.8.0")),
        ] {
            let lowest = [false, true].map(|users| lowest_fit(version, users));
            assert_eq!(lowest, [alone, shared].map(|fit| fit.map(str::to_owned)), "{version}");
        }
    }

    #[test]
    fn the_documentation_shows_the_same_list() {
        let page = include_str!("../../../../docs/operations.md");
        let row = |fault: &ReleaseFault| {
            let users = if fault.with_users { "with users: " } else { "" };
            let advice = if fault.advice.is_empty() { String::new() } else { format!("; {}", fault.advice) };
            format!("| {} | {users}{}{advice} |\n", fault.fixed_in(), fault.fault)
        };
        let rows: String = FAULTS.iter().map(row).collect();
        let table = format!("| fixed in | fault |\n|---|---|\n{rows}\n");
        assert!(page.contains(&table), "docs/operations.md lacks\n{table}");
        let lowest = |users| {
            let lines = ["3.4.0", "3.5.0", "3.6.0", "3.7.0"].into_iter();
            lines.filter_map(|line| lowest_fit(line, users)).collect::<Vec<_>>().join(", ")
        };
        let lowest = format!("Lowest fit releases: {}; with users {}.\n", lowest(false), lowest(true));
        assert!(page.contains(&lowest), "docs/operations.md lacks\n{lowest}");
    }
}
