use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use elastic_rendezvous::job::NodeId;
use elastic_rendezvous::job::samples::overview;

fn round(state: &str) -> Value {
    json!({ "number": 3, "generation": 1, "state": state, "reason": "node b was lost" })
}

fn event(at_ms: u64, state: &str) -> Value {
    json!({ "at_ms": at_ms, "round": 3, "state": state, "reason": format!("at {at_ms}") })
}

/// Two jobs that continue, and two that have ended, `c` last.
fn four() -> Overview {
    let progress = json!({
        "generation": 1, "round": 3, "step": 1200, "total_steps": 5000, "loss": 2.34567, "steps_per_second": 4.125,
        "furthest_step": 1200, "since_ms": 0, "at_ms": 400_000, "productive_ms": 300_000,
    });
    overview(&[
        ("a/round", round("failed")),
        ("a/events/000000000001", event(1_000, "failed")),
        ("b/round", round("running")),
        ("b/progress", progress),
        ("c/round", round("succeeded")),
        ("c/events/000000000001", event(2_000, "succeeded")),
        ("d/round", round("forming")),
    ])
}

/// What is on the screen, without its colours.
fn shown(screen: &mut Screen, overview: &Overview, columns: usize, rows: usize) -> Vec<String> {
    let lines = screen.draw((overview, &Silent::new()), None, columns, rows, 951_827_696_789);
    assert_eq!(lines.len(), rows, "the screen is full and no more");
    let plain = |line: &String| {
        let mut text = line.clone();
        for style in [PLAIN, BOLD, FAINT, REVERSED, RED, YELLOW] {
            text = text.replace(style, "");
        }
        assert!(text.chars().count() <= columns && !text.contains('\x1b'), "{text:?}");
        text
    };
    lines.iter().map(plain).collect()
}

fn first_words(lines: &[String]) -> Vec<&str> {
    lines.iter().map(|line| line.split_whitespace().next().unwrap_or_default()).collect()
}

#[test]
fn jobs_that_go_on_come_first_and_then_those_that_ended_last() {
    let mut screen = Screen::new("etcd0:2379 /elastic".into());
    let lines = shown(&mut screen, &four(), 160, 10);
    assert_eq!(
        lines[0],
        "2000-02-29 12:34:56 UTC   etcd0:2379 /elastic   4 jobs, 1 running, 1 forming, 1 succeeded, 1 failed"
    );
    assert_eq!(first_words(&lines[2..7]), ["JOB", "b", "d", "c", "a"]);
    let cells: Vec<&str> = lines[3].split("  ").filter(|cell| !cell.is_empty()).map(str::trim).collect();
    assert_eq!(cells[4..], ["1200/5000", "2.3457", "4.12", "75 %", "0", "node b was lost"]);
}

#[test]
fn keys_choose_open_scroll_and_go_back() {
    let overview = four();
    let mut screen = Screen::new("here".into());
    let chosen = |screen: &mut Screen| {
        let lines = screen.draw((&overview, &Silent::new()), None, 80, 10, 0);
        let line = lines.iter().find(|line| line.starts_with(REVERSED)).map(|line| line[REVERSED.len()..].to_owned());
        line.map(|line| line[..1].to_owned())
    };
    assert_eq!(chosen(&mut screen).as_deref(), Some("b"));
    for (key, is) in [
        (Key::Down, "d"),
        (Key::PageDown, "a"),
        (Key::Down, "a"),
        (Key::Up, "c"),
        (Key::Back, "c"),
        (Key::PageUp, "b"),
        (Key::Up, "b"),
        (Key::Down, "d"),
    ] {
        assert_eq!(screen.press(key, &overview), Next::Show);
        assert_eq!(chosen(&mut screen).as_deref(), Some(is), "after {key:?}");
    }
    screen.press(Key::Open, &overview);
    let whole = shown(&mut screen, &overview, 80, 40);
    assert_eq!(whole[2..4], ["job         d", "state       forming, but no node is here"]);
    let top = shown(&mut screen, &overview, 80, 8);
    screen.press(Key::Down, &overview);
    let below = shown(&mut screen, &overview, 80, 8);
    assert_eq!(top[3], below[2], "a line further down");
    for _ in 0..50 {
        screen.press(Key::PageDown, &overview);
        shown(&mut screen, &overview, 80, 8);
    }
    assert!(!shown(&mut screen, &overview, 80, 8)[2].is_empty(), "not beyond the end");
    screen.press(Key::Back, &overview);
    assert_eq!(chosen(&mut screen).as_deref(), Some("d"));
    assert_eq!(screen.press(Key::Quit, &overview), Next::Quit);
}

#[test]
fn the_cursor_stays_on_its_job_and_in_sight() {
    let many: Vec<(String, Value)> = (0..50).map(|n| (format!("job{n:02}/round"), round("running"))).collect();
    let many: Vec<(&str, Value)> = many.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
    let mut overview = overview(&many);
    let mut screen = Screen::new("here".into());
    shown(&mut screen, &overview, 80, 12);
    for _ in 0..30 {
        screen.press(Key::Down, &overview);
    }
    let in_sight = |screen: &mut Screen, overview: &Overview| {
        let lines = screen.draw((overview, &Silent::new()), None, 80, 12, 0);
        lines.iter().any(|line| line.starts_with(&format!("{REVERSED}job30")))
    };
    assert!(in_sight(&mut screen, &overview));
    overview.jobs.pop_first();
    assert!(in_sight(&mut screen, &overview), "another job was deleted");
    screen.press(Key::Open, &overview);
    overview.jobs.remove(&"job30".parse().unwrap());
    assert!(shown(&mut screen, &overview, 80, 12)[2].contains("job job30 was deleted"));
    screen.press(Key::Back, &overview);
    shown(&mut screen, &overview, 80, 12);
}

#[test]
fn small_screens_no_jobs_and_a_silent_store_are_shown_too() {
    let mut screen = Screen::new("here".into());
    let none = Overview::new("/elastic");
    assert!(shown(&mut screen, &none, 80, 5)[2].starts_with("no jobs yet"));
    for key in [Key::Down, Key::Open, Key::Back, Key::PageUp] {
        assert_eq!(screen.press(key, &none), Next::Show);
    }
    for (columns, rows) in [(1, 1), (3, 2), (10, 3), (40, 4)] {
        shown(&mut screen, &four(), columns, rows);
    }
    let silent = screen.draw((&four(), &Silent::new()), Some("connect: \u{1b}[2Jrefused"), 80, 10, 0);
    assert!(silent[1].contains("this may be old: connect: \\u{1b}[2Jrefused"), "{:?}", silent[1]);
}

#[test]
fn an_open_job_tells_which_of_its_nodes_are_silent() {
    let node = json!({
        "name": "n", "incarnation": "1", "machine": "m", "boot": "b", "host": "h", "slots": 1, "role": "default",
        "peer": { "host": "h", "port": 1 }, "phase": "running", "round": 3,
    });
    let overview = overview(&[("b/round", round("running")), ("b/nodes/n:1", node)]);
    let mut screen = Screen::new("here".into());
    screen.press(Key::Open, &overview);
    let mut drawn = |silent: &Silent| screen.draw((&overview, silent), None, 120, 30, 0).join("\n");
    assert!(!drawn(&Silent::new()).contains("silent"));
    let silent = Silent::from([(NodeId::from_text("n:1"), Duration::from_secs(7))]);
    let lines = drawn(&silent);
    assert!(lines.contains("silent for 7 s") && lines.contains("running, but no node is here"), "{lines}");
}

#[test]
fn keys_are_read_in_any_pieces_that_a_terminal_sends() {
    for (bytes, keys) in [
        (&b"\x1b[A\x1bOBq"[..], vec![Key::Up, Key::Down, Key::Quit]),
        (b"\x1b", vec![Key::Back]),
        (b"\x1b[5~\x1b[6~\r", vec![Key::PageUp, Key::PageDown, Key::Open]),
        (b"xjk\x03", vec![Key::Down, Key::Up, Key::Quit]),
        (b"\x1b[1;5Cj", vec![Key::Down]),
        (b"\x1b[", vec![]),
    ] {
        assert_eq!(Key::all(bytes), keys, "{bytes:?}");
    }
}
