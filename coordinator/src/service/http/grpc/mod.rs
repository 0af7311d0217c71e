//! The gRPC API, `proto/proto/jobs.proto`: which message is which [`Operation`], and the answer as a message. The
//! messages have JSON's names, so that serde turns an operation's answer into one.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::Response as HttpResponse;
use axum::{Router, middleware};
use elastic_proto::jobs::ask_request::Wish as WishMessage;
use elastic_proto::jobs::jobs_server::{Jobs, JobsServer};
use elastic_proto::jobs::{
    AskReply, AskRequest, DESCRIPTORS, DeleteReply, DeleteRequest, DropCheckpointReply, DropCheckpointRequest,
    EventsReply, EventsRequest, GetRequest, Job, JobState, ListReply, ListRequest, MeReply, MeRequest, WatchAllReply,
    WatchAllRequest, WatchReply, WatchRequest,
};
use futures::Stream;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tonic::server::NamedService;
use tonic::{Request, Response, Status};
use tonic_reflection::server::Builder;

use super::Site;
use super::access::{Caller, Refuse, admit};
use super::messages::{LONGEST, fitting, json, message};
use super::operations::{self, Listing, Operation};
use super::problem::Problem;
use super::watching::{self, Watching};
use crate::operator::Wish;
use elastic_store::listener::{Hold, Share};

pub(super) fn router(site: &Arc<Site>) -> Router<Arc<Site>> {
    let places = (Share::Monitors.connections() / 2).max(1);
    let calls = Calls { site: Arc::clone(site), watches: Arc::new(Semaphore::new(places)) };
    let jobs = JobsServer::new(calls).max_decoding_message_size(LONGEST);
    let router = Router::new()
        .route_service(&path(&jobs), jobs)
        .layer(middleware::from_fn_with_state((Arc::clone(site), refuse as Refuse), admit));
    // What there is to call is no secret: it is in the documentation.
    let described = || Builder::configure().register_encoded_file_descriptor_set(DESCRIPTORS);
    match (described().build_v1(), described().build_v1alpha()) {
        (Ok(new), Ok(old)) => {
            let (new, old) = (new.max_decoding_message_size(LONGEST), old.max_decoding_message_size(LONGEST));
            router.route_service(&path(&new), new).route_service(&path(&old), old)
        }
        (Err(error), _) | (_, Err(error)) => {
            tracing::warn!("gRPC clients cannot ask what there is to call: {error}");
            router
        }
    }
}

fn path<S: NamedService>(_: &S) -> String {
    format!("/{}/{{*call}}", S::NAME)
}

fn refuse(problem: Problem) -> HttpResponse {
    Status::from(problem).into_http()
}

fn wish(asked: Option<WishMessage>) -> Result<Wish, Problem> {
    let none = || {
        Problem(
            StatusCode::BAD_REQUEST,
            "there is no wish in this request, or one that this release does not know".into(),
        )
    };
    let Value::Object(asked) = json(&asked.ok_or_else(none)?)? else { return Err(none()) };
    let (name, mut fields) = asked.into_iter().next().ok_or_else(none)?;
    if let Some(fields) = fields.as_object_mut() {
        // This is how a text that was left out arrives.
        fields.retain(|_, value| value != "");
    }
    operations::wish(&name, fields)
}

/// Protobuf has no list that is null: a flag says that all jobs are meant.
fn me(mut told: Value) -> Result<MeReply, Problem> {
    let jobs = told["jobs"].take();
    told["all_jobs"] = jobs.is_null().into();
    told["jobs"] = if jobs.is_null() { json!([]) } else { jobs };
    message(told)
}

struct Calls {
    site: Arc<Site>,
    /// How many watches may be open.
    watches: Arc<Semaphore>,
}

impl Calls {
    /// Carries out what a request asks; the answer as a message.
    async fn carry<T: DeserializeOwned + Send + 'static>(
        &self,
        caller: &Caller,
        id: &str,
        operation: Operation,
    ) -> Result<Response<T>, Status> {
        let told = self.site.carry(caller, id, operation).await?;
        Ok(Response::new(operations::aside(move || message(told)).await?))
    }

    fn watching<T>(&self, request: &Request<T>) -> Result<Watching, Status> {
        let full = |_| Status::resource_exhausted("as many watches are open here as there may be: try again later");
        let place = Arc::clone(&self.watches).try_acquire_owned().map_err(full)?;
        let kept = request.extensions().get::<Hold>().map(Hold::keep);
        let given = request.metadata().as_ref().get(header::AUTHORIZATION);
        let token: HeaderMap = given.map(|token| (header::AUTHORIZATION, token.clone())).into_iter().collect();
        Ok(Watching::new(Arc::clone(&self.site), token, (place, kept)))
    }
}

fn parts<T>(request: Request<T>) -> Result<(Caller, T), Status> {
    let caller = request.extensions().get::<Caller>().cloned();
    Ok((caller.ok_or_else(|| Status::internal("the caller was not identified"))?, request.into_inner()))
}

type Updates<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Jobs for Calls {
    type WatchStream = Updates<WatchReply>;
    type WatchAllStream = Updates<WatchAllReply>;

    async fn me(&self, request: Request<MeRequest>) -> Result<Response<MeReply>, Status> {
        let (caller, MeRequest {}) = parts(request)?;
        Ok(Response::new(me(self.site.carry(&caller, "", Operation::Me).await?)?))
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<ListReply>, Status> {
        let (caller, ListRequest { state, after, limit }) = parts(request)?;
        let unknown = |_| Status::invalid_argument(format!("there is no state {state}"));
        let state = match JobState::try_from(state).map_err(unknown)? {
            JobState::Unspecified => None,
            state => Some(message(json(&state)?)?),
        };
        let listing = Listing {
            state,
            after: (!after.is_empty()).then_some(after),
            limit: (limit > 0).then_some(limit as usize),
        };
        let mut page: ListReply = self.carry(&caller, "", Operation::Jobs(listing)).await?.into_inner();
        let fitting = fitting(&page.jobs);
        if fitting < page.jobs.len() {
            page.jobs.truncate(fitting);
            page.next = page.jobs.last().map(|last| last.job.clone());
        }
        Ok(Response::new(page))
    }

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<Job>, Status> {
        let (caller, GetRequest { job }) = parts(request)?;
        self.carry(&caller, &job, Operation::Job).await
    }

    async fn events(&self, request: Request<EventsRequest>) -> Result<Response<EventsReply>, Status> {
        let (caller, EventsRequest { job, after, limit }) = parts(request)?;
        let limit = (limit > 0).then_some(limit as usize);
        self.carry(&caller, &job, Operation::Events { after, limit, wait: Duration::ZERO }).await
    }

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let watching = self.watching(&request)?;
        let (_, WatchRequest { job, after }) = parts(request)?;
        Ok(Response::new(Box::pin(watching::one(watching, job, after))))
    }

    async fn watch_all(&self, request: Request<WatchAllRequest>) -> Result<Response<Self::WatchAllStream>, Status> {
        Ok(Response::new(Box::pin(watching::all(self.watching(&request)?))))
    }

    async fn ask(&self, request: Request<AskRequest>) -> Result<Response<AskReply>, Status> {
        let (caller, AskRequest { job, wish: asked }) = parts(request)?;
        // Who may not change the job hears of that first, whatever is asked.
        caller.operates(&job)?;
        self.carry(&caller, &job, Operation::Ask(wish(asked)?)).await
    }

    async fn delete(&self, request: Request<DeleteRequest>) -> Result<Response<DeleteReply>, Status> {
        let (caller, DeleteRequest { job, dry_run }) = parts(request)?;
        self.carry(&caller, &job, Operation::Delete { dry_run }).await
    }

    async fn drop_checkpoint(
        &self,
        request: Request<DropCheckpointRequest>,
    ) -> Result<Response<DropCheckpointReply>, Status> {
        let (caller, DropCheckpointRequest { job }) = parts(request)?;
        self.carry(&caller, &job, Operation::DropCheckpoint).await
    }
}

#[cfg(test)]
mod tests;
