//! The admin page of `adit node`, whose address one process leaves to the next.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::sleep;

use crate::admin::{self, AdminError, AdminListener, AdminState};

/// How often an address is tried that another process is about to leave.
const RETRY: Duration = Duration::from_millis(10);
/// After how many tries in vain the log says so.
const PATIENCE: u32 = 300;

/// The page; open or not.
#[derive(Clone)]
pub(super) struct AdminPage {
    address: SocketAddr,
    state: AdminState,
    close: watch::Sender<bool>,
}

impl AdminPage {
    pub(super) fn new(address: SocketAddr, state: AdminState) -> Self {
        Self {
            address,
            state,
            close: watch::Sender::new(false),
        }
    }

    /// Opens the page.
    pub(super) async fn open(&self) -> Result<(), AdminError> {
        let listener = AdminListener::bind(self.address).await?;
        match listener.local_addr() {
            Ok(address) => tracing::info!("admin page on http://{address}"),
            Err(error) => tracing::warn!("asking for the admin page's address: {error}"),
        }
        let (state, mut closed) = (self.state.clone(), self.close.subscribe());
        let until = async move { drop(closed.wait_for(|close| *close).await) };
        tokio::spawn(async move {
            if let Err(error) = admin::serve(listener, state, until).await {
                tracing::error!("the admin page has ended: {error}");
            }
        });
        Ok(())
    }

    /// Opens the page as soon as another process has left its address.
    pub(super) fn open_when_free(&self) {
        let page = self.clone();
        tokio::spawn(async move {
            let mut tries = 0;
            while let Err(error) = page.open().await {
                tries += 1;
                if tries == PATIENCE {
                    tracing::error!("{error}; trying again");
                }
                sleep(RETRY * (tries / PATIENCE + 1)).await;
            }
        });
    }

    /// Leaves the address; requests under way are answered first.
    pub(super) fn close(&self) {
        self.close.send_replace(true);
    }
}
