//! An API server for tests: objects with versions over real HTTP, which several clients reach, each by a way of its own that
//! can be cut.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Bytes, to_bytes};
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use kube::Client;
use serde_json::{Value, json};

/// The objects by their path.
#[derive(Clone, Default)]
pub(super) struct FakeApi {
    objects: Arc<Mutex<Objects>>,
}

#[derive(Default)]
struct Objects {
    version: u64,
    by_path: BTreeMap<String, Value>,
    writes: Vec<(String, Value)>,
}

/// A client, and whether it reaches the API server.
pub(super) struct Way {
    pub(super) client: Client,
    /// How many requests get through yet.
    left: Arc<AtomicI64>,
}

impl Way {
    pub(super) fn cut(&self, cut: bool) {
        self.cut_after(if cut { 0 } else { i64::MAX / 2 });
    }

    /// Lets so many requests through.
    pub(super) fn cut_after(&self, requests: i64) {
        self.left.store(requests, Ordering::SeqCst);
    }
}

impl FakeApi {
    pub(super) async fn way(&self) -> Way {
        let left = Arc::new(AtomicI64::new(i64::MAX / 2));
        let (api, of_way) = (self.clone(), left.clone());
        let router = Router::new().fallback(move |request: Request| async move {
            if of_way.fetch_sub(1, Ordering::SeqCst) <= 0 {
                // Not 503, which clients repeat by themselves.
                return status(StatusCode::INTERNAL_SERVER_ERROR, "cut");
            }
            let (method, path) = (request.method().clone(), request.uri().path().to_owned());
            let watched = request.uri().query().is_some_and(|query| query.contains("watch=true"));
            let body = to_bytes(request.into_body(), 1 << 20).await.unwrap_or_default();
            if watched {
                tokio::time::sleep(std::time::Duration::from_millis(200)).await;
                return "".into_response();
            }
            api.answer(&method, &path, &body)
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await });
        let config = kube::Config::new(format!("http://{address}").parse().unwrap());
        Way {
            client: Client::try_from(config).unwrap(),
            left,
        }
    }

    /// An object as it is now.
    pub(super) fn object(&self, path: &str) -> Option<Value> {
        self.objects.lock().unwrap().by_path.get(path).cloned()
    }

    /// Every version of an object that there was.
    pub(super) fn history(&self, path: &str) -> Vec<Value> {
        let objects = self.objects.lock().unwrap();
        let of_path = objects.writes.iter().filter(|(of, _)| of == path);
        of_path.map(|(_, object)| object.clone()).collect()
    }

    /// Somebody else writes it.
    pub(super) fn put(&self, path: &str, mut object: Value) {
        let mut objects = self.objects.lock().unwrap();
        objects.version += 1;
        object["metadata"]["resourceVersion"] = objects.version.to_string().into();
        objects.by_path.insert(path.into(), object);
    }

    pub(super) fn remove(&self, path: &str) {
        self.objects.lock().unwrap().by_path.remove(path);
    }

    fn answer(&self, method: &Method, path: &str, body: &Bytes) -> Response {
        let mut objects = self.objects.lock().unwrap();
        let sent: Value = serde_json::from_slice(body).unwrap_or_default();
        let there = objects.by_path.get(path).cloned();
        let (path, mut next) = match (method.as_str(), there) {
            ("GET", Some(object)) => return json_of(&object),
            ("GET" | "PUT" | "DELETE", None) => return status(StatusCode::NOT_FOUND, "not found"),
            ("POST", _) => {
                let name = sent["metadata"]["name"].as_str().unwrap_or_default();
                let path = format!("{path}/{name}");
                if objects.by_path.contains_key(&path) {
                    return status(StatusCode::CONFLICT, "it is there already");
                }
                (path, sent)
            }
            ("PUT", Some(object)) => {
                let said = &sent["metadata"]["resourceVersion"];
                if !said.is_null() && *said != object["metadata"]["resourceVersion"] {
                    return status(StatusCode::CONFLICT, "it has been changed");
                }
                if object["immutable"] == true && object["data"] != sent["data"] {
                    return status(StatusCode::UNPROCESSABLE_ENTITY, "it is immutable");
                }
                (path.to_owned(), sent)
            }
            ("DELETE", Some(_)) => {
                objects.by_path.remove(path);
                return json_of(&json!({"kind": "Status", "apiVersion": "v1", "status": "Success"}));
            }
            _ => return status(StatusCode::METHOD_NOT_ALLOWED, "not here"),
        };
        objects.version += 1;
        next["metadata"]["resourceVersion"] = objects.version.to_string().into();
        objects.by_path.insert(path.clone(), next.clone());
        objects.writes.push((path, next.clone()));
        json_of(&next)
    }
}

fn json_of(value: &Value) -> Response {
    ([("content-type", "application/json")], value.to_string()).into_response()
}

fn status(code: StatusCode, message: &str) -> Response {
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code.as_u16(),
        "reason": code.canonical_reason().unwrap_or_default().replace(' ', ""),
    });
    (code, json_of(&status)).into_response()
}
