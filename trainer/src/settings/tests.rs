//! Flags, their limits, and what each is worth.

use super::*;

fn read(variables: &[(&str, &str)]) -> Result<Environment, EnvironmentError> {
    Environment::read(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into()))
}

#[test]
fn workers_share_their_nodes_processors() {
    for (processors, workers, threads) in [(8, 1, 8), (8, 3, 2), (2, 4, 1), (1, 1, 1), (8, 0, 1)] {
        assert_eq!(divided(processors, workers).get(), threads, "{processors} processors, {workers} workers");
    }
    assert_eq!(threads("3").map(NonZeroUsize::get), Ok(3));
    for wrong in ["0", "-1", "Auto", ""] {
        assert_eq!(threads(wrong), Err("must be auto, or a number above 0".to_owned()));
    }
}

#[test]
fn numbers_beyond_every_machine_are_refused() {
    let beyond = |change: fn(&mut Settings)| {
        let mut settings = Settings::default();
        change(&mut settings);
        settings.beyond()
    };
    assert_eq!(beyond(|_| ()), None);
    assert_eq!(beyond(|settings| settings.shards = 65_536.try_into().unwrap()), None);
    for (said, change) in [
        ("--shards 65537 is more than 65536", (|s| s.shards = 65_537.try_into().unwrap()) as fn(&mut Settings)),
        ("--threads 3000 is more than 1024", |s| s.threads = 3000.try_into().unwrap()),
        ("--epochs 1000000001 is more than 1000000000", |s| s.epochs = 1_000_000_001.try_into().unwrap()),
    ] {
        assert_eq!(beyond(change).as_deref(), Some(said));
    }
}

#[test]
fn settings_that_contradict_each_other_are_refused() {
    let said = |change: fn(&mut Settings)| {
        let mut settings = Settings::default();
        change(&mut settings);
        settings.contradiction().unwrap_or_default()
    };
    let sgd = |settings: &mut Settings| settings.optimizer = OptimizerName::Sgd;
    assert_eq!((said(|_| ()), said(sgd)), ("", ""));
    assert!(said(|settings| settings.momentum = 0.9).starts_with("--momentum needs"));
    assert!(said(|settings| settings.nesterov = true).starts_with("--nesterov needs --optimizer"));
    assert!(
        said(|settings| (settings.optimizer, settings.nesterov) = (OptimizerName::Sgd, true)).ends_with("--momentum")
    );
    assert!(said(|settings| (settings.optimizer, settings.eps) = (OptimizerName::Sgd, 1e-6)).starts_with("--betas"));
}

#[test]
fn buckets_are_counted_in_numbers() {
    for (megabytes, numbers) in [(25.0, 25 << 18), (0.5, 1 << 17), (1e-9, 1), (0.0, 0)] {
        assert_eq!(Settings { bucket_mb: megabytes, ..Settings::default() }.bucket(), numbers);
    }
}

#[test]
fn without_variables_a_worker_is_alone() {
    let alone = read(&[("MASTER_ADDR", "")]).unwrap();
    assert_eq!((alone.rank, alone.world_size, alone.agent), (0, 1, None));
}

#[test]
fn records_go_to_the_workers_logs_unless_a_path_is_given() {
    let error_file = ("TORCHELASTIC_ERROR_FILE", "/logs/run/attempt_0/1/error.json");
    let folder = |variables: &[(&str, &str)]| read(variables).unwrap().record_dir;
    assert_eq!(folder(&[("TORCHELASTIC_ERROR_FILE", "")]), None);
    assert_eq!(folder(&[error_file]), Some("/logs/run/attempt_0/1".into()));
    assert_eq!(folder(&[error_file, ("ELASTIC_RECORD_DIR", "/records")]), Some("/records".into()));
}

#[test]
fn wrong_variables_are_named() {
    for (variables, name) in [
        (&[("RANK", "first")][..], "RANK is \"first\""),
        (&[("RANK", "2"), ("WORLD_SIZE", "2")], "RANK is 2 but WORLD_SIZE is 2"),
        (&[("WORLD_SIZE", "2"), ("MASTER_PORT", "29500")], "MASTER_ADDR is not set"),
        (&[("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "99999")], "MASTER_PORT is \"99999\""),
    ] {
        let error = read(variables).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
}
