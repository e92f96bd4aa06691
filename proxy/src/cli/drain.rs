//! The end of a process: what is open goes on for a while, nothing new is taken.

use std::time::Duration;

use anyhow::Context as _;
use futures_util::FutureExt as _;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, timeout};

use super::admin_page::AdminPage;
use super::handover::{Standing, Wish};
use super::keep::Keeper;
use crate::telemetry::Telemetry;

/// How often a drain looks whether it is done.
const POLL: Duration = Duration::from_millis(10);
/// How long a process that has handed over still accepts what was on its way to its listeners: longer than the first
/// repetition of a lost packet of a handshake.
const ON_THEIR_WAY: Duration = Duration::from_millis(2_500);
/// How long nothing may have been open before a process that has handed over ends: connections that are still being
/// made do not count as open.
const QUIET: Duration = Duration::from_secs(1);

/// SIGTERM and SIGINT.
pub(super) struct StopSignals {
    term: Signal,
    int: Signal,
}

impl StopSignals {
    pub(super) fn install() -> anyhow::Result<Self> {
        let install = |kind| signal(kind).context("installing the handlers of SIGTERM and SIGINT");
        Ok(Self {
            term: install(SignalKind::terminate())?,
            int: install(SignalKind::interrupt())?,
        })
    }

    pub(super) async fn wait(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }

    /// Whether one has come that nobody has waited for yet.
    pub(super) fn have_come(&mut self) -> bool {
        self.wait().now_or_never().is_some()
    }

    /// Waits for a signal, and then for so long, or for a second one: whoever has stopped this process may be starting
    /// another in its place. One that has begun to take over is waited for.
    pub(super) async fn wait_for_good(&mut self, standing: &Standing, successor: Duration) {
        self.wait().await;
        standing.tell_to_stop();
        if successor.is_zero() {
            return;
        }
        tracing::info!(
            "told to stop; taking new connections for {} ms more, until a successor takes over",
            successor.as_millis()
        );
        let nobody_comes = async {
            sleep(successor).await;
            standing.unheard().await;
        };
        tokio::select! {
            () = nobody_comes => {}
            () = self.wait() => {}
        }
    }
}

/// How the workers drain.
pub(super) struct Drain<'a> {
    pub(super) started: watch::Sender<bool>,
    pub(super) deadline: Duration,
    pub(super) telemetry: &'a Telemetry,
}

impl Drain<'_> {
    /// After a signal: nothing new is taken from now on, by nobody. A second signal ends it. `let_go` lets go what only one
    /// process may hold, once there is a successor after all.
    pub(super) async fn after_stop(
        self,
        stop: &mut StopSignals,
        wishes: &mut mpsc::Receiver<Wish>,
        admin: &AdminPage,
        let_go: impl Future<Output = ()>,
    ) {
        tracing::info!("draining for at most {} ms", self.deadline.as_millis());
        self.started.send_replace(true);
        let mut let_go = Some(let_go);
        let successors = async {
            while let Some(wish) = wishes.recv().await {
                match wish {
                    Wish::Freeze(done) => drop(done.send(())),
                    Wish::Thaw => {}
                    Wish::Drain(done) => {
                        tracing::info!("a successor has taken over");
                        admin.close();
                        if let Some(let_go) = let_go.take() {
                            let_go.await;
                        }
                        let _ = done.send(());
                    }
                }
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = self.emptied(Duration::ZERO) => {}
            () = successors => {}
            () = stop.wait() => {}
        }
    }

    /// After a successor has taken over. A first signal is no news then, whether it came before or comes now; a second ends it.
    pub(super) async fn after_handover(self, stop: &mut StopSignals, told: bool, keeper: &mut Keeper) {
        tracing::info!(
            "a successor has taken over; draining for at most {} ms",
            self.deadline.as_millis()
        );
        let drained = async {
            sleep(ON_THEIR_WAY.min(self.deadline)).await;
            self.started.send_replace(true);
            self.emptied(QUIET.min(self.deadline)).await;
        };
        let twice = async {
            if !told {
                stop.wait().await;
                tracing::info!("told to stop while draining; told again, the open connections are reset");
            }
            stop.wait().await;
        };
        tokio::select! {
            () = drained => {}
            () = keeper.end_departed() => {}
            () = twice => {}
        }
    }

    /// Waits until nothing has been open for so long, at most until the deadline.
    async fn emptied(&self, quiet: Duration) {
        let empty = async {
            let mut since = None;
            loop {
                if self.telemetry.open_connections() > 0 {
                    since = None;
                } else if since.get_or_insert_with(Instant::now).elapsed() >= quiet {
                    return;
                }
                sleep(POLL).await;
            }
        };
        if timeout(self.deadline, empty).await.is_err() {
            tracing::warn!(
                "{} connections are reset: the drain's deadline has passed",
                self.telemetry.open_connections()
            );
        }
    }
}
