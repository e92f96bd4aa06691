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

/// Told when nothing more is to be taken.
#[derive(Clone)]
pub(super) struct Drain {
    /// By anybody: the process ends.
    pub(super) process: watch::Receiver<bool>,
    /// By these listeners of the pod: it has left the mesh, or has others.
    pub(super) pod: watch::Receiver<bool>,
}

impl Drain {
    /// Waits until that is so.
    pub(super) async fn begun(&mut self) {
        // Where the sender is gone, so is whoever would be served.
        tokio::select! {
            _ = self.process.wait_for(|draining| *draining) => {}
            _ = self.pod.wait_for(|retired| *retired) => {}
        }
    }
}

/// Accepts until that is to end, and then what the kernel has accepted by then; waits for all of that. Dropping it ends
/// everything it has accepted.
pub(super) async fn accept_all<F>(
    worker: Rc<Worker>,
    pod: Arc<LocalPod>,
    listener: TcpListener,
    drain: Drain,
    handle: impl Fn(Rc<Worker>, Arc<LocalPod>, TcpStream, SocketAddr, Drain) -> F,
) where
    F: Future<Output = ()> + 'static,
{
    let mut connections = JoinSet::new();
    let mut draining = drain.clone();
    let mut pause = PAUSE.0;
    loop {
        tokio::select! {
            () = draining.begun() => break,
            Some(_) = connections.join_next() => {}
            accepted = listener.accept() => match accepted {
                Ok((tcp, from)) => {
                    pause = PAUSE.0;
                    let from = SocketAddr::new(from.ip().to_canonical(), from.port());
                    connections.spawn_local(handle(Rc::clone(&worker), Arc::clone(&pod), tcp, from, drain.clone()));
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
        connections.spawn_local(handle(Rc::clone(&worker), Arc::clone(&pod), tcp, from, drain.clone()));
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
