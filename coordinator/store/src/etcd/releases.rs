//! Which releases of etcd have faults that matter here. The one home of this list: docs/operations.md shows the same.

/// A fault of etcd, and the releases that fixed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReleaseFault {
    /// What goes wrong, for people.
    pub fault: &'static str,
    /// The first release without it in each line of releases that had it, oldest line first.
    mended: &'static [Release],
}

type Release = (u32, u32, u32);

/// All that are known, newest first.
pub const FAULTS: [ReleaseFault; 5] = [
    ReleaseFault { fault: "a linearizable read can be stale after a pause", mended: &[(3, 5, 28), (3, 6, 9)] },
    ReleaseFault { fault: "a renewal can succeed on a revoked lease", mended: &[(3, 5, 23), (3, 6, 5)] },
    ReleaseFault { fault: "a watch opened at a compacted revision can miss a deletion", mended: &[(3, 5, 18)] },
    ReleaseFault { fault: "an etcd leader that is stuck on its disk can revoke every lease", mended: &[(3, 5, 13)] },
    // Seen on 3.5.1, whose processors were all busy. 3.5.5 fixed it, and 3.5.7 another panic that came with that.
    ReleaseFault {
        fault: "a read that its client gives up can end the server's process",
        mended: &[(3, 4, 23), (3, 5, 7)],
    },
];

impl ReleaseFault {
    /// The releases that fixed it, for people.
    pub fn mended_in(&self) -> String {
        let releases: Vec<_> = self.mended.iter().map(|(x, y, z)| format!("{x}.{y}.{z}")).collect();
        releases.join(", ")
    }

    /// A line of releases that never fixed it has it, if it is older than one that did.
    fn is_in(&self, release: Release) -> bool {
        let line = |of: &Release| (of.0, of.1);
        let own_line = self.mended.iter().find(|mended| line(mended) == line(&release));
        own_line.or(self.mended.first()).is_some_and(|mended| release < *mended)
    }
}

/// The faults of a release, by its version as etcd tells it. `None`: that is no version of etcd's.
pub fn faults_of(version: &str) -> Option<Vec<&'static ReleaseFault>> {
    let release = parse(version)?;
    Some(FAULTS.iter().filter(|fault| fault.is_in(release)).collect())
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
    fn each_release_has_the_faults_that_were_mended_after_it() {
        for (version, faults) in [
            ("3.4.22", 5),
            ("3.4.23", 4),
            ("3.5.0", 5),
            ("3.5.6", 5),
            ("3.5.7", 4),
            ("3.5.12", 4),
            ("3.5.13", 3),
            ("3.5.17", 3),
            ("3.5.18", 2),
            ("3.5.22", 2),
            ("3.5.23", 1),
            ("3.5.27", 1),
            ("3.5.28", 0),
            ("3.6.0", 2),
            ("3.6.0-rc.1", 2),
            ("3.6.4", 2),
            ("3.6.5", 1),
            ("3.6.8", 1),
            ("3.6.9", 0),
            ("3.6.9+embedded", 0),
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
    fn the_documentation_shows_the_same_list() {
        let page = include_str!("../../../../docs/operations.md");
        let rows: Vec<_> =
            FAULTS.iter().map(|fault| format!("| {} | {} |\n", fault.mended_in(), fault.fault)).collect();
        let table = format!("| before | fault |\n|---|---|\n{}\n", rows.concat());
        assert!(page.contains(&table), "docs/operations.md lacks\n{table}");
    }
}
