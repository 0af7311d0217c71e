//! A node's way to etcd: delays, losses, outages.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use elastic_store::StoreError;
use elastic_torchelastic::etcd_v2::{Answer, News, Request};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use tokio::time::{Instant, sleep, timeout_at};

use crate::etcd::Etcd;

/// As long as a client of ours waits for an answer.
const DEADLINE: Duration = Duration::from_secs(5);
/// As long as a long poll lasts.
const POLL: Duration = Duration::from_secs(60);

/// How bad it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weather {
    /// How likely a request takes long.
    pub(crate) slow: f64,
    /// How likely a request or its answer is lost.
    pub(crate) loss: f64,
}

/// One node's client.
#[derive(Clone)]
pub(crate) struct Client {
    etcd: Rc<RefCell<Etcd>>,
    weather: Rc<RefCell<Weather>>,
    random: Rc<RefCell<SmallRng>>,
}

fn away() -> StoreError {
    StoreError::Unavailable { endpoints: "etcd".into(), cause: "connection refused".into() }
}

impl Client {
    pub(crate) fn new(etcd: Rc<RefCell<Etcd>>, weather: Rc<RefCell<Weather>>, seed: u64) -> Client {
        Client { etcd, weather, random: Rc::new(RefCell::new(SmallRng::seed_from_u64(seed))) }
    }

    pub(crate) fn chance(&self, likely: f64) -> bool {
        self.random.borrow_mut().random_bool(likely)
    }

    /// A time of at most `most`.
    pub(crate) fn up_to(&self, most: Duration) -> Duration {
        most.mul_f64(self.random.borrow_mut().random())
    }

    async fn travel(&self) {
        let slow = self.weather.borrow().slow;
        let way = if self.chance(slow) { Duration::from_millis(800) } else { Duration::from_millis(6) };
        sleep(self.up_to(way)).await;
    }

    /// A request of torchrun's: its HTTP client tries again what was lost, so it fails in outages alone.
    pub(crate) async fn reliable(&self, request: &Request) -> Result<Answer, StoreError> {
        self.travel().await;
        if self.etcd.borrow().is_away() {
            return Err(away());
        }
        let answer = self.etcd.borrow_mut().request(request, Instant::now());
        self.travel().await;
        Ok(answer)
    }

    /// A request of ours.
    pub(crate) async fn request(&self, request: &Request) -> Result<Answer, StoreError> {
        let loss = self.weather.borrow().loss;
        self.travel().await;
        if self.etcd.borrow().is_away() {
            return Err(away());
        }
        let harmless = matches!(request, Request::Read { .. } | Request::Refresh { .. });
        let lost = |cause: &str| {
            let (endpoints, cause) = ("etcd".to_owned(), cause.to_owned());
            if harmless {
                StoreError::Unavailable { endpoints, cause }
            } else {
                StoreError::Unknown { endpoints, cause }
            }
        };
        if self.chance(loss) {
            sleep(DEADLINE).await;
            return Err(lost("the request was lost"));
        }
        let answer = self.etcd.borrow_mut().request(request, Instant::now());
        if self.chance(loss) {
            sleep(DEADLINE).await;
            return Err(lost("the answer was lost"));
        }
        self.travel().await;
        // A server that goes away takes answers with it.
        if self.etcd.borrow().is_away() && self.chance(0.5) {
            return Err(lost("connection reset"));
        }
        Ok(answer)
    }

    /// A long poll.
    pub(crate) async fn wait(&self, key: &str, index: u64, limit: Option<Duration>) -> Result<News, StoreError> {
        self.travel().await;
        let until = Instant::now() + limit.unwrap_or(POLL);
        let news = self.etcd.borrow().news();
        loop {
            // One thread: nothing happens between the look and the wait.
            let change = {
                let etcd = self.etcd.borrow();
                if etcd.is_away() {
                    return Err(away());
                }
                etcd.change(key, index)
            };
            if let Some(change) = change {
                self.travel().await;
                return Ok(change);
            }
            if timeout_at(until, news.notified()).await.is_err() {
                return Ok(News::Nothing);
            }
        }
    }
}
