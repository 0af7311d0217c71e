//! What the processes of a job use, and whether that grows. Memory is what a process has for itself alone: what files and
//! shared memory it has mapped is not counted.

use elastic_tests::prelude::*;

/// What was in use at one time, by name: `agent memory KiB`. Of several processes of a kind, the one with the most.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sample(pub BTreeMap<String, f64>);

impl Sample {
    /// Adds what this process uses. One that has ended uses nothing.
    pub(crate) fn process(&mut self, kind: &str, pid: u32) {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let number = |name: &str| -> Option<f64> {
            let line = status.lines().find(|line| line.starts_with(name))?;
            line.split_whitespace().nth(1)?.parse().ok()
        };
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).ok().map(|open| open.count() as f64);
        for (what, used) in
            [("memory KiB", number("RssAnon:")), ("threads", number("Threads:")), ("descriptors", descriptors)]
        {
            used.into_iter().for_each(|used| self.at_most(&format!("{kind} {what}"), used));
        }
    }

    /// Adds how many files there are below a folder, and their size.
    pub(crate) fn folder(&mut self, kind: &str, folder: &Path) {
        let (files, bytes) = within(folder);
        self.at_most(&format!("{kind} files"), files);
        self.at_most(&format!("{kind} KiB"), bytes / 1024.0);
    }

    pub(crate) fn at_most(&mut self, name: &str, used: f64) {
        let most = self.0.entry(name.to_owned()).or_default();
        *most = most.max(used);
    }
}

fn within(folder: &Path) -> (f64, f64) {
    let mut sum = (0.0, 0.0);
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(about) = entry.metadata() else { continue };
        let (files, bytes) = if about.is_dir() { within(&entry.path()) } else { (1.0, about.len() as f64) };
        sum = (sum.0 + files, sum.1 + bytes);
    }
    sum
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Trend {
    pub(crate) name: String,
    /// The median of the second quarter of the time. The first is for what is filled once.
    pub(crate) before: f64,
    pub(crate) after: f64,
    pub(crate) most: f64,
    /// The most in the first half of the time. What has a bound goes up and down below that; a leak goes above it.
    most_before: f64,
}

impl Trend {
    /// Whether it has grown by more than chance explains: by a tenth, and by what may be taken at any time. etcd's
    /// collector of garbage lets its memory go up and down by some MiB.
    pub(crate) fn grows(&self) -> bool {
        let (kind, what) = self.name.split_once(' ').unwrap_or((&self.name, ""));
        let chance = match (kind, what) {
            ("etcd", "memory KiB") => 8192.0,
            ("keys", _) => 16.0,
            (_, "memory KiB" | "KiB") => 4096.0,
            (_, "threads") => 2.0,
            _ => 4.0,
        };
        self.after - self.most_before > f64::max(chance, 0.1 * self.most_before)
    }
}

/// The trend of everything that was in use, by name.
pub(crate) fn trends(samples: &[Sample]) -> Vec<Trend> {
    let names: std::collections::BTreeSet<&String> = samples.iter().flat_map(|sample| sample.0.keys()).collect();
    let of = |name: &String| {
        let used: Vec<f64> = samples.iter().filter_map(|sample| sample.0.get(name).copied()).collect();
        let quarter = used.len() / 4;
        Trend {
            name: name.clone(),
            before: percentile(&used[quarter..(2 * quarter).max(quarter + 1).min(used.len())], 50.0),
            after: percentile(&used[used.len() - quarter.max(1)..], 50.0),
            most: used.iter().copied().fold(0.0, f64::max),
            most_before: used[..(used.len() / 2).max(1)].iter().copied().fold(0.0, f64::max),
        }
    };
    names.into_iter().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trend(used: &[f64]) -> Trend {
        let sample = |used: &f64| Sample([("agent memory KiB".to_owned(), *used)].into());
        trends(&used.iter().map(sample).collect::<Vec<_>>()).remove(0)
    }

    #[test]
    fn what_grows_is_found_and_what_is_filled_once_does_not() {
        let hour = |used: fn(f64) -> f64| (0..240).map(|at| used(f64::from(at))).collect::<Vec<_>>();
        // A leak of 100 KiB with each fault; a cache that is full after a few minutes; what comes and goes.
        assert!(trend(&hour(|at| 20_000.0 + 100.0 * at)).grows());
        assert!(!trend(&hour(|at| 20_000.0 + 100.0 * at.min(40.0))).grows());
        assert!(!trend(&hour(|at| 20_000.0 + 9_000.0 * (at % 7.0))).grows());
        // Ports that are held for a while: few when the first half ends, many later, and as many at the beginning.
        assert!(!trend(&hour(|at| if (60.0..180.0).contains(&at) { 20_000.0 } else { 40_000.0 })).grows());
        let named = |name: &str, before, after| {
            let name = name.into();
            Trend { name, before, after, most: after, most_before: before }
        };
        assert!(named("runtime files", 6.0, 13.0).grows() && !named("runtime files", 6.0, 9.0).grows());
        assert!(named("keys", 252.0, 279.0).grows() && !named("keys", 252.0, 260.0).grows());
        assert!(named("etcd memory KiB", 34_716.0, 50_272.0).grows() && !named("etcd threads", 9.0, 11.0).grows());
        let seen = trend(&[1.0, 5.0, 3.0, 3.0]);
        assert_eq!((seen.before, seen.after, seen.most), (5.0, 3.0, 5.0));
        assert_eq!(trend(&[7.0]).after, 7.0);
    }

    #[test]
    fn a_process_uses_what_it_uses() {
        let mut sample = Sample::default();
        sample.process("test", std::process::id());
        let before = sample.clone();
        let kept = vec![1_u8; 64 << 20];
        let open = std::fs::File::open("/dev/null").unwrap();
        sample.process("test", std::process::id());
        let grown = |name: &str| sample.0[name] - before.0[name];
        assert!(grown("test memory KiB") > 60_000.0 && before.0["test threads"] >= 1.0);
        assert!(before.0["test descriptors"] >= 3.0);
        drop((kept, open));

        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("in")).unwrap();
        std::fs::write(folder.path().join("in/a"), [0; 3 << 10]).unwrap();
        sample.folder("disk", folder.path());
        assert_eq!((sample.0["disk files"], sample.0["disk KiB"]), (1.0, 3.0));
    }
}
