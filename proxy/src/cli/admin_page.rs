//! Admin and metrics page of `adit node`, whose addresses one process leaves to the next, and its own answer to probes.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::admin::{self, AdminError, AdminListener, AdminState};

/// How often an address is tried that another process is about to leave.
const RETRY: Duration = Duration::from_millis(10);
/// After how many tries in vain the log says so.
const PATIENCE: u32 = 300;

/// The pages; open or not.
#[derive(Clone)]
pub(super) struct AdminPage {
    pages: Vec<(Page, SocketAddr)>,
    state: AdminState,
    close: watch::Sender<bool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Page {
    Admin,
    Metrics,
}

impl AdminPage {
    pub(super) fn new(admin: SocketAddr, metrics: Option<SocketAddr>, state: AdminState) -> Self {
        let metrics = metrics.map(|address| (Page::Metrics, address));
        Self {
            pages: [(Page::Admin, admin)].into_iter().chain(metrics).collect(),
            state,
            close: watch::Sender::new(false),
        }
    }

    /// Opens the pages.
    pub(super) async fn open(&self) -> Result<(), AdminError> {
        for (page, address) in &self.pages {
            self.open_one(*page, *address).await?;
        }
        Ok(())
    }

    async fn open_one(&self, page: Page, address: SocketAddr) -> Result<(), AdminError> {
        let (listener, name) = match page {
            Page::Admin => (AdminListener::bind(address).await?, "admin page"),
            Page::Metrics => (AdminListener::bind_for_metrics(address).await?, "metrics page"),
        };
        match listener.local_addr() {
            Ok(address) => tracing::info!("{name} on http://{address}"),
            Err(error) => tracing::warn!("asking for the {name}'s address: {error}"),
        }
        let (state, mut closed) = (self.state.clone(), self.close.subscribe());
        let until = async move { drop(closed.wait_for(|close| *close).await) };
        tokio::spawn(async move {
            let ended = match page {
                Page::Admin => admin::serve(listener, state, until).await,
                Page::Metrics => admin::serve_metrics(listener, state, until).await,
            };
            if let Err(error) = ended {
                tracing::error!("the {name} has ended: {error}");
            }
        });
        Ok(())
    }

    /// Opens each page as soon as another process has left its address.
    pub(super) fn open_when_free(&self) {
        for (page, address) in self.pages.clone() {
            let pages = self.clone();
            tokio::spawn(async move {
                let mut tries = 0;
                while let Err(error) = pages.open_one(page, address).await {
                    tries += 1;
                    if tries == PATIENCE {
                        tracing::error!("{error}; trying again");
                    }
                    sleep(RETRY * (tries / PATIENCE + 1)).await;
                }
            });
        }
    }

    /// Leaves the addresses; requests under way are answered first.
    pub(super) fn close(&self) {
        self.close.send_replace(true);
    }

    /// Says at a Unix socket, from now on and whichever process has the addresses, whether this one is ready.
    pub(super) fn answer_probes(&self, socket: &Path) -> anyhow::Result<()> {
        let at = || format!("listening for probes at {}", socket.display());
        // Of a process before this one.
        match fs::remove_file(socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error).with_context(at),
            _ => {}
        }
        let (listener, state) = (UnixListener::bind(socket).with_context(at)?, self.state.clone());
        tokio::spawn(async move {
            if let Err(error) = admin::serve_probes(listener, state).await {
                tracing::error!("probes are no longer answered: {error}");
            }
        });
        Ok(())
    }
}
