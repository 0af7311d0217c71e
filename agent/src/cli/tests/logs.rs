//! Flags and variables of logs and reports.

use super::*;
use crate::output::logs::{LogOptions, Rotation, StreamsByRank};
use crate::output::outcome::report::ReportForm;

#[test]
fn streams_may_differ_by_rank_also_beyond_nine() {
    let options = run("-r 0:3,10:1 -t 2 t");
    let both = Streams { stdout: true, stderr: true };
    let redirects = &options.output.logs.redirects;
    assert_eq!((redirects.of(0), redirects.of(1)), (both, Streams::default()));
    assert_eq!(redirects.of(10), Streams { stdout: true, stderr: false });
    assert_eq!(options.output.logs.tee, StreamsByRank::All(Streams { stdout: false, stderr: true }));
    assert_eq!(run("--log-dir /dev/null t").output.logs.dir, LogDir::Disabled);
}

#[test]
fn log_flags_arrive() {
    let logs =
        run("--local-ranks-filter=0,12 --log-line-prefix-template=[${rank}]: --duplicate-stdout-filters a,,b,c \
                    --duplicate_stderr_filters=e --log-rotate 1M:2 --log-attempts=3 t")
        .output
        .logs;
    assert_eq!(logs.console_ranks, Some([0, 12].into()));
    assert_eq!(logs.prefix.as_deref(), Some("[${rank}]:"));
    assert_eq!(logs.duplicate_stdout, "a,,b,c".parse().ok());
    assert_eq!(logs.duplicate_stderr, "e".parse().ok());
    assert_eq!(logs.rotation, Some(Rotation { size: 1 << 20, keep: 2 }));
    assert_eq!(logs.attempts, Some(3));
    assert_eq!(run("t").output.logs, LogOptions::default());

    // The variable that every flag has takes precedence over torchrun's own variable.
    let own = ("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "own");
    let prefix = |env: &[(&str, &str)]| run_with("t", env).unwrap().output.logs.prefix;
    assert_eq!(prefix(&[own]).as_deref(), Some("own"));
    assert_eq!(prefix(&[own, ("PET_LOG_LINE_PREFIX_TEMPLATE", "pet")]).as_deref(), Some("pet"));

    assert_eq!(run("t").output.report, ReportForm::Text);
    assert_eq!(run("--report=json t").output.report, ReportForm::Json);
}

#[test]
fn the_log_level_has_pythons_names() {
    for (name, level) in [("debug", Level::DEBUG), ("WARNING", Level::WARN), ("CRITICAL", Level::ERROR)] {
        assert_eq!(run_with("t", &[("LOGLEVEL", name)]).unwrap().log.level, level);
    }
    let odd = run_with("t", &[("LOGLEVEL", "loud")]).unwrap();
    assert_eq!(odd.log.level, Level::INFO);
    assert!(odd.log.warnings[0].contains("no such level"), "{:?}", odd.log.warnings);
    assert_eq!(run_with("-v t", &[("LOGLEVEL", "ERROR")]).unwrap().log.level, Level::DEBUG);
}
