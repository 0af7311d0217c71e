//! The web page: three files in this program, nothing from elsewhere. It holds no data: it calls the
//! API as every other program does, with a token where one is needed, so its own files need none.

use std::sync::Arc;

use axum::Router;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::Site;

/// Scripts, styles and data from this port alone, and none within the text: what a job's records say cannot run.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub(super) fn router() -> Router<Arc<Site>> {
    Router::new()
        .route("/", get(async || file("text/html; charset=utf-8", include_str!("page/index.html"))))
        .route("/page.js", get(async || file("text/javascript; charset=utf-8", include_str!("page/page.js"))))
        .route("/page.css", get(async || file("text/css; charset=utf-8", include_str!("page/page.css"))))
}

fn file(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        // A new version of this program has a new page.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, text).into_response()
}
