//! The alerts: each fires, says what to do, and is silent while all is well.

use elastic_tests::prelude::*;

use super::deploy;
use super::prometheus::program;

pub(super) fn alerts() -> Vec<String> {
    let text = std::fs::read_to_string(deploy("prometheus/alerts.yaml")).unwrap();
    let names: Vec<_> =
        text.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).map(str::to_owned).collect();
    assert!(names.len() > 5, "{names:?}");
    names
}

#[test]
fn each_alert_fires_and_none_while_all_is_well() {
    let Some(promtool) = program("promtool") else { return };
    let folder = deploy("prometheus");
    for verb in ["check", "test"] {
        let file = if verb == "check" { "alerts.yaml" } else { "alerts_test.yaml" };
        let output = Command::new(&promtool).args([verb, "rules", file]).current_dir(&folder).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "promtool {verb} rules {file}:\n{said}");
    }
    let tests = std::fs::read_to_string(folder.join("alerts_test.yaml")).unwrap();
    for name in alerts() {
        assert!(tests.contains(&format!("alertname: {name}\n        exp_alerts:")), "no test fires {name}");
        assert!(tests.contains(&format!("{{alertname: {name}, eval_time")), "no test has {name} silent");
    }
}

#[test]
fn the_runbook_says_what_to_do_about_each_alert() {
    let runbook = std::fs::read_to_string(deploy("../docs/runbook.md")).unwrap();
    let rules = std::fs::read_to_string(deploy("prometheus/alerts.yaml")).unwrap();
    for name in alerts() {
        let entry = runbook.split_once(&format!("\n## {name}\n")).unwrap_or_else(|| panic!("no entry for {name}")).1;
        let entry = entry.split("\n## ").next().unwrap();
        assert!(entry.contains("\n1. "), "nothing to do about {name}");
        assert!(
            rules.contains(&format!("runbook: docs/runbook.md#{}\n", name.to_lowercase())),
            "{name} does not lead there"
        );
    }
}

#[test]
fn prometheus_leaves_the_label_job_alone() {
    let recipe = std::fs::read_to_string(deploy("README.md")).unwrap();
    assert!(
        recipe.contains("job_name: elastic\n    honor_labels: true"),
        "alerts and dashboard would see no job's name"
    );
}
