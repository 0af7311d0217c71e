//! Who calls the APIs, and what the caller may see and change. A token comes in each request's own header, never in a
//! cookie, so no other site's page can have a browser send it.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;

use super::problem::Problem;
use super::users::{Role, User, Users, Whose};
use super::{Shown, Site};
use elastic_rendezvous::job::{JobId, Requester, Via};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Caller {
    /// Anyone who reaches the port, where it has no users: may read.
    Anybody,
    User(User),
}

impl Caller {
    /// Whether a job is the caller's to see.
    pub(super) fn sees(&self, job: &JobId) -> bool {
        match self {
            Caller::Anybody => true,
            Caller::User(user) => user.jobs.as_ref().is_none_or(|jobs| jobs.contains(job)),
        }
    }

    /// In whose name the caller changes a job.
    pub(super) fn operates(&self, job: &str) -> Result<Requester, Problem> {
        let forbidden = |why: String| Err(Problem(StatusCode::FORBIDDEN, why));
        let user = match self {
            Caller::Anybody => {
                return forbidden(
                    "this port only reads: start the coordinator with --http-users, or use elasticctl".into(),
                );
            }
            Caller::User(user) => user,
        };
        if !job.parse::<JobId>().is_ok_and(|job| self.sees(&job)) {
            return Err(Problem::no_such_job(job));
        }
        match user.role {
            Role::Read => forbidden(format!("{} may only read: ask for a token of the role operate", user.name)),
            Role::Operate => Ok(Requester { name: user.name.clone(), via: Via::Api }),
        }
    }
}

/// How an API says why it lets a request not in.
pub(super) type Refuse = fn(Problem) -> Response;

/// Lets a request in with its [`Caller`], or refuses it.
pub(super) async fn admit(
    State((site, refuse)): State<(Arc<Site>, Refuse)>,
    mut request: Request,
    next: Next,
) -> Response {
    let called = if let Shown::Jobs(hosts) = &site.shown { hosts.admit(&request) } else { Ok(()) };
    match called.and_then(|()| site.caller(request.headers())) {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(problem) => refuse(problem),
    }
}

impl Site {
    /// Who sends a request with these headers, now.
    pub(super) fn caller(&self, headers: &HeaderMap) -> Result<Caller, Problem> {
        match &self.shown {
            Shown::Users(users) => caller(&users.now(), headers, elastic_store::clock::epoch_ms()),
            Shown::Monitoring | Shown::Jobs(_) => Ok(Caller::Anybody),
        }
    }
}

fn caller(users: &Users, headers: &HeaderMap, now_ms: u64) -> Result<Caller, Problem> {
    let refused = |why: String| Err(Problem(StatusCode::UNAUTHORIZED, why));
    let bearer = |value: &str| {
        let (scheme, token) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| token.trim().to_owned())
    };
    let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let Some(token) = given.and_then(bearer) else {
        return refused("a token is needed: send it as `Authorization: Bearer TOKEN`".into());
    };
    match users.whose(&token, now_ms) {
        Whose::Of(user) => Ok(Caller::User(user.clone())),
        Whose::Expired(user) => refused(format!("the token of {} has expired: ask for a new one", user.name)),
        Whose::Nobody => refused("no user has this token: was it replaced? Ask for a new one".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::http::users::Fingerprint;

    fn user(role: Role, jobs: Option<&[&str]>) -> User {
        let jobs = jobs.map(|jobs| jobs.iter().map(|job| job.parse().unwrap()).collect());
        User { name: "anna".into(), role, jobs, sha256: Fingerprint::of("secret"), expires_ms: Some(100) }
    }

    #[test]
    fn a_token_comes_in_its_header_alone() {
        let line = serde_json::to_string(&user(Role::Read, None)).unwrap();
        let users = Users::parse(&line).unwrap();
        for (name, value, now_ms, says) in [
            ("authorization", "Bearer secret", 99, ""),
            ("authorization", "bearer  secret", 99, ""),
            ("authorization", "Bearer secret", 100, "expired"),
            ("authorization", "Bearer secre", 99, "no user"),
            ("authorization", "Basic secret", 99, "a token is needed"),
            ("authorization", "secret", 99, "a token is needed"),
            ("cookie", "Bearer secret", 99, "a token is needed"),
        ] {
            let headers = HeaderMap::from_iter([(name.parse().unwrap(), value.parse().unwrap())]);
            let error = caller(&users, &headers, now_ms).err().map_or(String::new(), |Problem(_, why)| why);
            assert!(if says.is_empty() { error.is_empty() } else { error.contains(says) }, "{name}: {value}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn a_caller_changes_what_role_and_jobs_allow() {
        let operate =
            |caller: Caller, job: &str| caller.operates(job).map_or_else(|problem| problem.0.as_u16(), |_| 200);
        for (caller, job, status) in [
            (Caller::Anybody, "a", 403),
            (Caller::User(user(Role::Read, None)), "a", 403),
            (Caller::User(user(Role::Operate, None)), "a", 200),
            (Caller::User(user(Role::Operate, Some(&["a"]))), "a", 200),
            (Caller::User(user(Role::Operate, Some(&["a"]))), "b", 404),
            (Caller::User(user(Role::Read, Some(&["a"]))), "b", 404),
            (Caller::User(user(Role::Operate, Some(&[]))), "a", 404),
            (Caller::User(user(Role::Operate, None)), "a/b", 404),
        ] {
            assert_eq!(operate(caller.clone(), job), status, "{caller:?} {job}");
        }
    }
}
