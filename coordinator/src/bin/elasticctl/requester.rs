//! In whose name `elasticctl` asks. It is what the person says: etcd's users decide who may ask.

use elastic_rendezvous::job::{Requester, Via};

/// The name that was given, or the user and the host.
pub(crate) fn of(given: Option<String>) -> Requester {
    // With sudo, the person behind it.
    let user = ["SUDO_USER", "USER", "LOGNAME"].into_iter().find_map(|name| std::env::var(name).ok());
    let user = user.filter(|user| Requester::is_name(user));
    let user = user.unwrap_or_else(|| format!("uid {}", rustix::process::getuid().as_raw()));
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let name = given.unwrap_or_else(|| format!("{user}@{host}").chars().take(Requester::LONGEST_NAME).collect());
    Requester { name, via: Via::Elasticctl }
}
