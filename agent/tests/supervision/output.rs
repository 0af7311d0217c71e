//! The workers' output in files, on the console, and in both: nothing is lost, and no line is torn.

use std::fs::{self, File};
use std::time::{Duration, Instant};

use elastic_agent::for_tests::{Console, LogDir, LogNames, LogOptions, Logs, WorkerLogs};
use rustix::process::Signal;

use crate::scene::{Agent, Scene};

const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn scenes() -> Vec<Scene> {
    crate::scenes![alone:
        redirected_streams_go_to_their_files_and_no_attempt_erases_another,
        teed_streams_go_to_file_and_console,
        what_is_written_fast_arrives_whole,
        lines_of_many_workers_are_never_torn,
        a_worker_killed_in_mid_line_loses_nothing_and_tears_no_line,
        a_line_of_a_hundred_megabytes_survives_in_little_memory,
        bytes_that_are_no_text_survive_and_endless_lines_too,
        a_stray_that_holds_the_stream_delays_nothing,
        the_last_lines_of_stderr_are_known,
        ranks_that_are_filtered_reach_only_their_files,
        an_unusable_log_directory_is_an_error_at_once,
        a_log_directory_lost_later_sends_output_to_the_console,
        nothing_is_written_with_dev_null,
        lines_with_certain_words_are_copied,
        logs_are_rotated_on_request_redirected_ones_too,
    ]
}

/// Logs in the agent's directory, with files instead of a console.
struct Setting {
    agent: Agent,
    console: Console,
    logs: Logs,
    round: u64,
}

fn setting(agent: Agent, redirects: &str, tee: &str, change: impl FnOnce(&mut LogOptions)) -> Setting {
    let open = |name: &str| File::create(agent.directory.path().join(name)).unwrap();
    let console = Console::new(open("console.out"), open("console.err")).unwrap();
    let mut options = LogOptions {
        dir: LogDir::At(agent.directory.path().join("logs")),
        redirects: redirects.parse().unwrap(),
        tee: tee.parse().unwrap(),
        ..LogOptions::default()
    };
    change(&mut options);
    let names = LogNames { run_id: "a/job".to_owned(), role: "default".to_owned(), hostname: "here".to_owned() };
    let logs = Logs::open(options, names, console.clone()).unwrap();
    Setting { agent, console, logs, round: 0 }
}

impl Setting {
    /// Starts scripts as the workers of one attempt, and waits for all of them.
    async fn run(&mut self, scripts: &[&str]) -> Vec<WorkerLogs> {
        self.round += 1;
        let attempt = self.logs.begin_attempt(0, self.round);
        let mut all = Vec::new();
        for (rank, script) in scripts.iter().enumerate() {
            let (stdio, logs) = attempt.worker(rank as u32, 10 + rank as u32);
            let mut spec = self.agent.script(rank as u32, script);
            spec.stdio = stdio;
            self.agent.start(spec).await.unwrap();
            all.push(logs);
        }
        for _ in scripts {
            assert!(self.agent.exited().await.exit.success());
        }
        for logs in &all {
            assert!(logs.settled(PATIENCE).await);
        }
        assert!(self.logs.finish(PATIENCE).await);
        assert!(self.console.flush(PATIENCE));
        all
    }

    fn file(&self, path: &str) -> Vec<u8> {
        fs::read(self.logs.directory().unwrap().join(path)).unwrap()
    }

    fn console(&self, file: &str) -> Vec<u8> {
        fs::read(self.agent.directory.path().join(file)).unwrap()
    }
}

async fn redirected_streams_go_to_their_files_and_no_attempt_erases_another(agent: Agent) {
    let mut setting = setting(agent, "0:3,1:2", "0", |_| {});
    let name = setting.logs.directory().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
    assert!(name.starts_with("a_job_"), "{name}");
    let logs = setting.run(&["echo out; echo err >&2", "echo other >&2"]).await;
    assert_eq!(logs[1].error_file(), Some(&*setting.logs.directory().unwrap().join("attempt_0/1/error.json")));
    setting.run(&["echo again"]).await;
    assert_eq!(setting.file("attempt_0/0/stdout.log"), b"out\n");
    assert_eq!(setting.file("attempt_0/0/stderr.log"), b"err\n");
    assert_eq!(setting.file("attempt_0/1/stderr.log"), b"other\n");
    assert!(!setting.logs.directory().unwrap().join("attempt_0/1/stdout.log").exists());
    assert_eq!(setting.file("attempt_0_round_2/0/stdout.log"), b"again\n");
    assert_eq!(setting.console("console.out"), b"");
}

async fn teed_streams_go_to_file_and_console(agent: Agent) {
    let mut setting = setting(agent, "0", "3", |_| {});
    setting.run(&["printf 'a\\nb'; printf '10%%\\r20%%\\r\\n' >&2"]).await;
    assert_eq!(setting.file("attempt_0/0/stdout.log"), b"a\nb");
    assert_eq!(setting.console("console.out"), b"[default0]:a\n[default0]:b\n");
    assert_eq!(setting.file("attempt_0/0/stderr.log"), b"10%\r20%\r\n");
    assert_eq!(setting.console("console.err"), b"[default0]:10%\n[default0]:20%\n");

    let agent = setting.agent;
    let prefix = "${role_name}|$local_rank|${rank}|${hostname}|${other}> ";
    let mut setting = self::setting(agent, "0", "1", |options| options.prefix = Some(prefix.to_owned()));
    setting.run(&["echo x"]).await;
    assert_eq!(setting.console("console.out"), b"default|0|10|here|${other}> x\n");
}

async fn what_is_written_fast_arrives_whole(agent: Agent) {
    const LAST: usize = 3_000_000;
    let mut setting = setting(agent, "0:1", "1:1", |_| {});
    let start = Instant::now();
    let script = format!("seq 1 {LAST}");
    setting.run(&[&script, &script]).await;
    println!(
        "twice {} MB of lines, redirected and tee'd: {:?}",
        setting.file("attempt_0/0/stdout.log").len() / 1_000_000,
        start.elapsed()
    );
    let redirected = setting.file("attempt_0/0/stdout.log");
    let mut expected = 0;
    for line in redirected.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        expected += 1;
        assert_eq!(std::str::from_utf8(line).unwrap().parse::<usize>().unwrap(), expected);
    }
    assert_eq!(expected, LAST);
    assert!(redirected == setting.file("attempt_0/1/stdout.log"), "the tee'd file has the same bytes");
    let console = setting.console("console.out");
    assert_eq!(console.len(), redirected.len() + LAST * b"[default1]:".len());
}

async fn lines_of_many_workers_are_never_torn(agent: Agent) {
    let mut setting = setting(agent, "0", "3", |_| {});
    // Lines longer than a pipe's atomic write, from eight streams at the same time.
    let letters = ["a", "b", "c", "d"];
    let scripts = letters.map(|letter| {
        format!(
            "line=$(head -c 9000 /dev/zero | tr '\\0' {letter}); \
             (for n in $(seq 300); do echo $line; done) & (for n in $(seq 300); do echo $line >&2; done); wait"
        )
    });
    setting.run(&scripts.each_ref().map(String::as_str)).await;
    for file in ["console.out", "console.err"] {
        let console = String::from_utf8(setting.console(file)).unwrap();
        assert_eq!(console.lines().count(), 4 * 300);
        for line in console.lines() {
            let (prefix, text) = line.split_once(':').unwrap();
            let rank: usize = prefix.strip_prefix("[default").unwrap().strip_suffix(']').unwrap().parse().unwrap();
            assert_eq!(text, letters[rank].repeat(9000));
        }
    }
}

async fn a_worker_killed_in_mid_line_loses_nothing_and_tears_no_line(agent: Agent) {
    const LAST: u32 = 250_000;
    const KILLED: u32 = 7;
    let Setting { mut agent, console, logs, .. } = setting(agent, "0", "1", |_| {});
    let attempt = logs.begin_attempt(0, 1);
    let start = Instant::now();
    for rank in 0..8 {
        let last = if rank == KILLED { u32::MAX } else { LAST };
        let mut spec = agent.script(rank, &format!("exec seq 1 {last}"));
        (spec.stdio, _) = attempt.worker(rank, rank);
        agent.start(spec).await.unwrap();
    }
    // One of eight workers that write as fast as they can is killed.
    let log = |rank: u32| logs.directory().unwrap().join(format!("attempt_0/{rank}/stdout.log"));
    while fs::metadata(log(KILLED)).unwrap().len() < 1_000_000 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    agent.guard.signal(KILLED, Signal::KILL);
    for _ in 0..8 {
        agent.exited().await;
    }
    assert!(logs.finish(PATIENCE).await && console.flush(PATIENCE));

    // Each worker has all its lines, in order, in its file and on the console. Only the killed worker's last line may
    // be cut.
    let shown = String::from_utf8(fs::read(agent.directory.path().join("console.out")).unwrap()).unwrap();
    println!("eight workers, {} MB on the console: {:?}", shown.len() / 1_000_000, start.elapsed());
    let mut lines: Vec<Vec<&str>> = vec![Vec::new(); 8];
    for line in shown.lines() {
        let (rank, text) = line.strip_prefix("[default").unwrap().split_once("]:").unwrap();
        lines[rank.parse::<usize>().unwrap()].push(text);
    }
    for (rank, lines) in (0..).zip(&lines) {
        let file = fs::read_to_string(log(rank)).unwrap();
        assert!(file.lines().eq(lines.iter().copied()), "worker {rank}: file and console agree");
        let whole = if rank == KILLED { lines.len() - 1 } else { LAST as usize };
        assert!(lines[..whole].iter().zip(1..).all(|(line, n)| line.parse() == Ok(n)), "worker {rank}");
        assert!(whole > 100_000, "worker {rank} wrote {whole} lines");
    }
}

async fn bytes_that_are_no_text_survive_and_endless_lines_too(agent: Agent) {
    let mut setting = setting(agent, "0", "1", |_| {});
    setting.run(&["head -c 3000000 /dev/urandom > noise; cat noise", "head -c 3000000 /dev/zero"]).await;
    assert!(setting.file("attempt_0/0/stdout.log") == setting.console("noise"));
    assert_eq!(setting.file("attempt_0/1/stdout.log"), vec![0; 3_000_000]);
}

async fn a_line_of_a_hundred_megabytes_survives_in_little_memory(agent: Agent) {
    const LENGTH: u64 = 100_000_000;
    let mut setting = setting(agent, "0", "0:1,1:0", |_| {});
    let line = format!("head -c {LENGTH} /dev/zero");
    setting.run(&[&line, &format!("{line} >&2")]).await;
    let length = |path: &std::path::Path| fs::metadata(path).unwrap().len();
    assert_eq!(length(&setting.logs.directory().unwrap().join("attempt_0/0/stdout.log")), LENGTH);
    assert_eq!(length(&setting.agent.directory.path().join("console.err")), LENGTH, "passed on unchanged");
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak < 64 * 1024, "the agent took {peak} KiB");
}

async fn a_stray_that_holds_the_stream_delays_nothing(agent: Agent) {
    let Setting { mut agent, logs, .. } = setting(agent, "0", "3", |_| {});
    let (stdio, output) = logs.begin_attempt(0, 1).worker(0, 0);
    let mut spec = agent.script(0, "(setsid sleep 1000 &); printf 'last\nwords' >&2; exit 1");
    spec.stdio = stdio;
    agent.start(spec).await.unwrap();
    agent.exited().await;
    assert!(output.settled(PATIENCE).await);
    assert_eq!(output.stderr().read(), ["last", "words"]);
    assert!(!logs.finish(Duration::from_millis(50)).await, "the streams are open still");
    // The streams end only when the stray is gone.
    agent.stop_all(Signal::TERM, PATIENCE).await.unwrap();
    assert!(logs.finish(PATIENCE).await);
}

async fn the_last_lines_of_stderr_are_known(agent: Agent) {
    let mut setting = setting(agent, "0:2", "1:2", |_| {});
    let logs = setting.run(&["seq 1 30000 >&2", "seq 1 30000 >&2", "seq 1 30000 >&2", "true"]).await;
    let expected: Vec<String> = (29_961..=30_000).map(|n: u32| n.to_string()).collect();
    for rank in [0, 1, 2] {
        assert_eq!(logs[rank].stderr().read(), expected, "{rank}");
    }
    assert!(logs[3].stderr().read().is_empty());
    // Output that goes neither to a file nor through a prefix reaches the console unchanged.
    let passed = String::from_utf8(setting.console("console.err")).unwrap();
    let passed = passed.lines().filter(|line| !line.starts_with('['));
    assert!(passed.map(|line| line.parse::<u32>().unwrap()).eq(1..=30_000));
}

async fn ranks_that_are_filtered_reach_only_their_files(agent: Agent) {
    let mut setting = setting(agent, "0", "3", |options| options.console_ranks = Some([1].into()));
    setting.run(&["echo zero", "echo one"]).await;
    assert_eq!(setting.file("attempt_0/0/stdout.log"), b"zero\n");
    assert_eq!(setting.console("console.out"), b"[default1]:one\n");
}

async fn an_unusable_log_directory_is_an_error_at_once(agent: Agent) {
    let console = Console::standard().unwrap();
    fs::write(agent.directory.path().join("file"), "").unwrap();
    let dir = agent.directory.path().join("file");
    let options = LogOptions { dir: LogDir::At(dir.clone()), ..LogOptions::default() };
    let error = Logs::open(options, LogNames::default(), console).unwrap_err().to_string();
    assert!(error.starts_with(&format!("cannot create the log directory {}", dir.display())), "{error}");
    assert!(error.contains("--log-dir"), "{error}");
}

async fn a_log_directory_lost_later_sends_output_to_the_console(agent: Agent) {
    let mut setting = setting(agent, "3", "0", |_| {});
    // A folder that is only gone is made again.
    let directory = setting.logs.directory().unwrap().to_owned();
    fs::remove_dir_all(&directory).unwrap();
    fs::write(&directory, "").unwrap();
    setting.run(&["echo still here"]).await;
    assert_eq!(setting.console("console.out"), b"[default0]:still here\n");
}

async fn nothing_is_written_with_dev_null(agent: Agent) {
    let mut setting = setting(agent, "0:3", "1:3", |options| options.dir = LogDir::Disabled);
    let logs = setting.run(&["echo as without the flag >&2", "echo shown"]).await;
    assert!(setting.logs.directory().is_none() && logs[0].error_file().is_none());
    assert_eq!(setting.console("console.out"), b"[default1]:shown\n");
    assert_eq!(setting.console("console.err"), b"as without the flag\n");
}

async fn lines_with_certain_words_are_copied(agent: Agent) {
    let mut setting = setting(agent, "0:1", "1:1,2:1", |options| {
        options.duplicate_stdout = Some("loss,a,,b".parse().unwrap());
        options.console_ranks = Some([1].into());
    });
    let script = "echo loss 1; echo other; echo 'an a,b here'";
    setting.run(&[script, script, script]).await;
    let copied = String::from_utf8(setting.file("attempt_0/filtered_stdout.log")).unwrap();
    let mut copied: Vec<&str> = copied.lines().collect();
    copied.sort_unstable();
    let expected = ["[default1]:an a,b here", "[default1]:loss 1", "[default2]:an a,b here", "[default2]:loss 1"];
    assert_eq!(copied, expected, "of the tee'd workers, whatever reaches the console");
    assert_eq!(setting.console("console.out"), b"[default1]:loss 1\n[default1]:other\n[default1]:an a,b here\n");
    assert!(!setting.logs.directory().unwrap().join("attempt_0/filtered_stderr.log").exists());
}

async fn logs_are_rotated_on_request_redirected_ones_too(agent: Agent) {
    let rotation = "100K:3".parse().unwrap();
    let mut setting = setting(agent, "0:1", "1:1", |options| options.rotation = Some(rotation));
    setting.run(&["seq 1 100000", "seq 1 100000"]).await;
    for rank in [0, 1] {
        let names = ["stdout.log.3", "stdout.log.2", "stdout.log.1", "stdout.log"];
        let files = names.map(|name| setting.file(&format!("attempt_0/{rank}/{name}")));
        assert!(files[..3].iter().all(|file| (102_000..=102_410).contains(&file.len()) && file.ends_with(b"\n")));
        let kept = String::from_utf8(files.concat()).unwrap();
        let first: u32 = kept.lines().next().unwrap().parse().unwrap();
        assert!(first > 1 && kept.lines().map(|line| line.parse::<u32>().unwrap()).eq(first..=100_000));
        assert!(!setting.logs.directory().unwrap().join(format!("attempt_0/{rank}/stdout.log.4")).exists());
    }
    assert_eq!(setting.console("console.out").iter().filter(|byte| **byte == b'\n').count(), 100_000);
}
