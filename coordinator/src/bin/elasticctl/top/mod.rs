//! `elasticctl top`: all jobs on a terminal, as they change.
//!
//! | file | what it does |
//! |---|---|
//! | `screen.rs` | what is shown and what a key does, as pure functions |
//! | `terminal.rs` | the terminal: keys come from it, lines go to it |

mod screen;
mod terminal;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use elastic_rendezvous::job::Keys;
use elastic_rendezvous::job::overview::Overview;
use elastic_store::{Mirror, Store};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use elastic_coordinator::operator::Operator;
use screen::{Next, Screen};
use terminal::Terminal;

/// Time between two pictures when nothing happens: the clock continues.
const TICK: Duration = Duration::from_secs(1);
/// Time between two pictures of jobs that change all the time.
const LEAST: Duration = Duration::from_millis(200);
/// How often the store is asked whether it is there.
const CHECK: Duration = Duration::from_secs(3);

/// Shows the jobs until the operator has seen enough.
pub(crate) async fn run(operator: &Operator, place: &str, job: Option<&str>) -> anyhow::Result<()> {
    let mut screen = Screen::new(place.to_owned());
    if let Some(job) = job {
        screen.open(operator.job(job).await?.0);
    }
    let jobs = Keys::jobs(&operator.prefix);
    let mut mirror = Mirror::open(&*operator.store, &jobs).await?;
    let mut overview = Overview::new(&operator.prefix);
    overview.take(mirror.next().await?);
    let (told, mut trouble) = watch::channel(None);
    tokio::spawn(check(Arc::clone(&operator.store), jobs, told));

    let watch_for = |kind| signal(kind).context("watch for signals");
    let mut interrupt = watch_for(SignalKind::interrupt())?;
    let mut terminate = watch_for(SignalKind::terminate())?;
    let mut hangup = watch_for(SignalKind::hangup())?;
    let mut resized = watch_for(SignalKind::window_change())?;
    let mut terminal = Terminal::open().context("top draws on a terminal; elasticctl jobs prints the same once")?;
    loop {
        let (columns, rows) = terminal.size();
        let old = trouble.borrow_and_update().clone();
        terminal.draw(&screen.draw(&overview, old.as_deref(), columns, rows, elastic_store::clock::epoch_ms()))?;
        tokio::select! {
            news = mirror.next() => {
                overview.take(news?);
                tokio::time::sleep(LEAST).await;
                while let Some(news) = mirror.try_next()? {
                    overview.take(news);
                }
            }
            key = terminal.key() => match screen.press(key, &overview) {
                Next::Show => {}
                Next::Quit => return Ok(()),
            },
            () = tokio::time::sleep(TICK) => {}
            _ = resized.recv() => {}
            _ = trouble.changed() => {}
            _ = interrupt.recv() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
            _ = hangup.recv() => return Ok(()),
        }
    }
}

/// Tells why the store does not answer, while it does not. A watch alone would only be silent.
async fn check(store: Arc<dyn Store>, key: String, told: watch::Sender<Option<String>>) {
    loop {
        tokio::time::sleep(CHECK).await;
        told.send_replace(store.get(&key).await.err().map(|error| error.to_string()));
    }
}
