//! The record of results: one JSON file for all settings, with one fault in each line.

use std::fmt::Write as _;
use std::io::{Read, Seek, Write};

use anyhow::{Context, Result};
use clap::ValueEnum;
use elastic_tests::prelude::*;
use serde::{Deserialize, Serialize};

use super::scene::Stage;
use super::setting::name;
use super::testbed::Outcome;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SettingRecord {
    pub(crate) date: String,
    /// The stages at which faults were injected, in the order of a job's life.
    pub(crate) stages: Vec<String>,
    /// By fault and stage: the longest time without a step in seconds, how the job ended if it did not succeed, and
    /// `broken` if a promise was broken.
    pub(crate) faults: BTreeMap<String, BTreeMap<String, String>>,
}

/// The results of all settings, by the setting's name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record(pub BTreeMap<String, SettingRecord>);

impl Record {
    /// Reads a file. A file that does not exist has no results.
    pub(crate) fn read(path: &Path) -> Result<Record> {
        match std::fs::read_to_string(path) {
            Ok(text) => serde_json::from_str(&text).with_context(|| format!("read {}", path.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Record::default()),
            Err(error) => Err(error).with_context(|| format!("read {}", path.display())),
        }
    }

    /// Changes a file. Several campaigns may do so at the same time.
    pub(crate) fn change(path: &Path, change: impl FnOnce(&mut Record)) -> Result<()> {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
        let mut file = file.with_context(|| format!("open {}", path.display()))?;
        file.lock()?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let mut record = if text.is_empty() {
            Record::default()
        } else {
            serde_json::from_str(&text).with_context(|| format!("read {}", path.display()))?
        };
        change(&mut record);
        file.rewind()?;
        file.set_len(0)?;
        Ok(file.write_all(record.text()?.as_bytes())?)
    }

    pub(crate) fn has(&self, setting: &str, fault: &str, stage: Stage) -> bool {
        let faults = self.0.get(setting).and_then(|record| record.faults.get(fault));
        faults.is_some_and(|stages| stages.contains_key(&name(&stage)))
    }

    pub(crate) fn forget(&mut self, setting: &str, fault: &str, stage: Stage) {
        let faults = self.0.get_mut(setting).and_then(|record| record.faults.get_mut(fault));
        faults.map(|stages| stages.remove(&name(&stage)));
    }

    pub(crate) fn add(&mut self, setting: &str, fault: &str, stage: Stage, date: &str, outcome: &Outcome) {
        let record = self.0.entry(setting.to_owned()).or_default();
        record.date = date.to_owned();
        record.stages = Stage::value_variants().iter().map(name).collect();
        record.faults.entry(fault.to_owned()).or_default().insert(name(&stage), outcome.result());
    }

    fn text(&self) -> Result<String> {
        let mut settings = Vec::new();
        for (name, record) in &self.0 {
            let mut faults = Vec::new();
            for (fault, stages) in record.faults.iter().filter(|(_, stages)| !stages.is_empty()) {
                let results = record.stages.iter().filter_map(|stage| Some((stage, stages.get(stage)?)));
                let results: Result<Vec<String>> =
                    results.map(|(stage, result)| Ok(format!("{}: {}", json(stage)?, json(result)?))).collect();
                faults.push(format!("      {}: {{{}}}", json(fault)?, results?.join(", ")));
            }
            let stages: Result<Vec<String>> = record.stages.iter().map(|stage| json(stage)).collect();
            settings.push(format!(
                "  {}: {{\n    \"date\": {},\n    \"stages\": [{}],\n    \"faults\": {{\n{}\n    }}\n  }}",
                json(name)?,
                json(&record.date)?,
                stages?.join(", "),
                faults.join(",\n")
            ));
        }
        Ok(format!("{{\n{}\n}}\n", settings.join(",\n")))
    }

    /// One line for each setting: how its jobs ended, and the longest pause.
    pub(crate) fn summary(&self) -> String {
        let mut text = String::new();
        for (name, record) in &self.0 {
            let mut ends: BTreeMap<&str, usize> = BTreeMap::new();
            let (mut jobs, mut broken, mut longest) = (0, 0, (0.0, "no fault".to_owned()));
            for (fault, stages) in &record.faults {
                for (stage, result) in stages {
                    let mut words = result.split_whitespace();
                    let pause: f64 = words.next().and_then(|pause| pause.parse().ok()).unwrap_or(0.0);
                    let (flags, ended): (Vec<&str>, Vec<&str>) = words.partition(|word| *word == "broken");
                    jobs += 1;
                    broken += usize::from(!flags.is_empty());
                    *ends.entry(ended.first().unwrap_or(&"succeeded")).or_default() += 1;
                    if pause > longest.0 {
                        longest = (pause, format!("{fault}, {stage}"));
                    }
                }
            }
            let ends: Vec<String> = ends.iter().map(|(end, times)| format!("{times} {end}")).collect();
            let _ = writeln!(
                text,
                "{name}, {}: {} faults, {jobs} jobs: {}; {broken} broke a promise; longest time without a step {:.1} s \
                 ({})",
                record.date,
                record.faults.len(),
                ends.join(", "),
                longest.0,
                longest.1
            );
        }
        text
    }
}

fn json(text: &str) -> Result<String> {
    Ok(serde_json::to_string(text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(pause_s: f64, ended: &str, broken: &[&str]) -> Outcome {
        let broken = broken.iter().map(ToString::to_string).collect();
        Outcome { broken, pause_s, after_s: 1.0, restarts: 1, rounds: 2, ended: ended.into() }
    }

    #[test]
    fn a_file_has_one_fault_in_each_line_and_keeps_what_other_campaigns_wrote() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record.json");
        let add = |setting: &str, fault: &str, stage, outcome: &Outcome| {
            Record::change(&path, |record| record.add(setting, fault, stage, "2026-11-28", outcome)).unwrap();
        };
        add("plain", "a worker is killed", Stage::Running, &outcome(0.25, "succeeded", &[]));
        add("plain", "a worker is killed", Stage::Sealing, &outcome(1.5, "succeeded", &["a number falls"]));
        add("secured", "etcd is down", Stage::Joining, &outcome(0.0, "failed", &[]));
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(
            text.contains("\n      \"a worker is killed\": {\"sealing\": \"1.5 broken\", \"running\": \"0.2\"}\n"),
            "{text}"
        );
        assert!(text.contains("\"etcd is down\": {\"joining\": \"0.0 failed\"}"), "{text}");

        let record = Record::read(&path).unwrap();
        assert!(record.has("plain", "a worker is killed", Stage::Running) && !record.has("plain", "x", Stage::Running));
        assert_eq!(
            record.summary(),
            "plain, 2026-11-28: 1 faults, 2 jobs: 2 succeeded; 1 broke a promise; longest time without a step 1.5 s \
             (a worker is killed, sealing)\n\
             secured, 2026-11-28: 1 faults, 1 jobs: 1 failed; 0 broke a promise; longest time without a step 0.0 s \
             (no fault)\n"
        );

        // A result that is to come again is removed before.
        Record::change(&path, |record| record.forget("plain", "a worker is killed", Stage::Running)).unwrap();
        let record = Record::read(&path).unwrap();
        assert!(!record.has("plain", "a worker is killed", Stage::Running));
        assert!(record.has("plain", "a worker is killed", Stage::Sealing));
    }
}
