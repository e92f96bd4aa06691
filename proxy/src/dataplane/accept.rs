//! Taking connections from a pod's listeners.

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::worker::Worker;
use crate::node::LocalPod;

/// How long accepting pauses when the kernel has no descriptor or memory for a connection, at first and at most.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// A listener, and whether another has taken its place.
pub(super) struct Listener {
    pub(super) listener: TcpListener,
    pub(super) replaced: watch::Receiver<bool>,
}

/// Accepts until the process drains or the listener has been replaced, and then what the kernel has accepted by then;
/// waits for all of that. Dropping it ends everything it has accepted.
pub(super) async fn accept_all<F>(
    worker: Rc<Worker>,
    pod: Arc<LocalPod>,
    Listener { listener, mut replaced }: Listener,
    handle: impl Fn(Rc<Worker>, Arc<LocalPod>, TcpStream, SocketAddr) -> F,
) where
    F: Future<Output = ()> + 'static,
{
    let mut connections = JoinSet::new();
    let mut draining = worker.plane.draining.clone();
    let mut pause = PAUSE.0;
    loop {
        tokio::select! {
            _ = draining.wait_for(|draining| *draining) => break,
            _ = replaced.wait_for(|replaced| *replaced) => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((tcp, from)) => {
                    pause = PAUSE.0;
                    let from = SocketAddr::new(from.ip().to_canonical(), from.port());
                    connections.spawn_local(handle(Rc::clone(&worker), Arc::clone(&pod), tcp, from));
                }
                // The connection's own trouble.
                Err(error) if is_about_connection(&error) => {}
                // It listens no more. Whoever keeps pods enrolled makes others.
                Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                    worker.plane.broken.lock().unwrap_or_else(PoisonError::into_inner).insert(Arc::clone(pod.uid()));
                    break;
                }
                Err(error) => {
                    tracing::warn!(
                        "accepting connections of {}/{}: {error}; pausing for {} ms",
                        pod.workload().namespace, pod.workload().name, pause.as_millis()
                    );
                    sleep(pause).await;
                    pause = (pause * 2).min(PAUSE.1);
                }
            },
        }
    }
    while let Some(Ok((tcp, from))) = listener.accept().now_or_never() {
        let from = SocketAddr::new(from.ip().to_canonical(), from.port());
        connections.spawn_local(handle(Rc::clone(&worker), Arc::clone(&pod), tcp, from));
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

fn is_about_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted
    )
}
