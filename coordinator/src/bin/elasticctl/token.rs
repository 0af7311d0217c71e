//! `elasticctl token`: makes a token for the coordinator's API. The line to keep goes to standard output, the token,
//! which no one keeps but its user, to standard error.

use std::time::Duration;

use elastic_coordinator::service::http::users::{Fingerprint, Role, User, new_token};
use elastic_rendezvous::job::JobId;

use crate::print;

#[allow(clippy::print_stderr)]
pub(crate) fn make(
    name: String,
    role: Role,
    jobs: Vec<JobId>,
    expires: Option<Duration>,
    json: bool,
) -> anyhow::Result<()> {
    let token = new_token();
    let expires_ms =
        expires.map(|time| elastic_store::clock::epoch_ms() + u64::try_from(time.as_millis()).unwrap_or(u64::MAX / 2));
    let jobs = (!jobs.is_empty()).then(|| jobs.into_iter().collect());
    let user = User { name, role, jobs, sha256: Fingerprint::of(&token), expires_ms };
    if json {
        return crate::print_json(&serde_json::json!({ "token": token, "line": user }));
    }
    print(&format!("{}\n", serde_json::to_string(&user)?))?;
    eprintln!("elasticctl: the token, which is shown only now: {token}");
    Ok(())
}
