//! What is said over Envoy's and Adit's tunnels.

use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpStream};

use adit_tests::bed::Pod;
use adit_tests::net::{self, Digest, Ending};

use crate::world::LONG;

/// A client and the server that its connection to `to` must reach; the server listens at `at`.
pub(super) struct Pair<'a> {
    pub(super) client: &'a Pod,
    pub(super) to: SocketAddr,
    pub(super) server: &'a Pod,
    pub(super) at: SocketAddr,
}

impl Pair<'_> {
    /// Both send so many bytes at once, which arrive whole on the other side.
    pub(super) fn both_send(&self, bytes: u64) {
        let (at, to) = (self.at, self.to);
        let serving = self
            .server
            .serve(|stage| net::serve_one(stage, at, |stream, _| both_ways(stream, bytes, 1)));
        let serving = serving.unwrap();
        let asking = self.client.spawn(|| both_ways(net::connect(to)?, bytes, 2)).unwrap();
        let (client_sent, (client_got, client_end)) = asking.join(LONG).unwrap();
        let (server_sent, (server_got, server_end)) = serving.join(LONG).unwrap();
        assert_eq!(
            (&client_got, client_end),
            (&server_sent, Ending::Fin),
            "from server to client"
        );
        assert_eq!(
            (&server_got, server_end),
            (&client_sent, Ending::Fin),
            "from client to server"
        );
        assert_eq!((client_got.bytes, server_got.bytes), (bytes, bytes));
    }

    /// The client ends its side before the server begins to answer.
    pub(super) fn client_ends_first(&self, bytes: u64) {
        let (at, to) = (self.at, self.to);
        let serving = self
            .server
            .serve(|stage| net::serve_one(stage, at, |stream, _| listen_then_talk(stream, bytes)));
        let serving = serving.unwrap();
        let asking = self
            .client
            .spawn(|| talk_then_listen(net::connect(to)?, bytes))
            .unwrap();
        let (sent, (got, end)) = asking.join(LONG).unwrap();
        let ((server_got, server_end), server_sent) = serving.join(LONG).unwrap();
        assert_eq!((server_got, server_end), (sent, Ending::Fin), "the client's side");
        assert_eq!((got, end), (server_sent, Ending::Fin), "the answer");
    }

    /// The server speaks first and ends its side before the client begins to answer.
    pub(super) fn server_ends_first(&self, bytes: u64) {
        let (at, to) = (self.at, self.to);
        let serving = self
            .server
            .serve(|stage| net::serve_one(stage, at, |stream, _| talk_then_listen(stream, bytes)));
        let serving = serving.unwrap();
        let asking = self
            .client
            .spawn(|| listen_then_talk(net::connect(to)?, bytes))
            .unwrap();
        let ((got, end), sent) = asking.join(LONG).unwrap();
        let (server_sent, (server_got, server_end)) = serving.join(LONG).unwrap();
        assert_eq!((got, end), (server_sent, Ending::Fin), "the server's side");
        assert_eq!((server_got, server_end), (sent, Ending::Fin), "the answer");
    }
}

type Received = (Digest, Ending);

fn both_ways(mut stream: TcpStream, bytes: u64, seed: u64) -> anyhow::Result<(Digest, Received)> {
    let mut writer = stream.try_clone()?;
    let writing = std::thread::spawn(move || {
        let sent = net::send_pattern(&mut writer, bytes, seed)?;
        writer.shutdown(Shutdown::Write)?;
        anyhow::Ok(sent)
    });
    let received = net::drain(&mut stream);
    let sent = writing.join().map_err(|_| anyhow::anyhow!("the writer panicked"))??;
    Ok((sent, received))
}

fn talk_then_listen(mut stream: TcpStream, bytes: u64) -> anyhow::Result<(Digest, Received)> {
    let sent = net::send_pattern(&mut stream, bytes, 3)?;
    stream.shutdown(Shutdown::Write)?;
    Ok((sent, net::drain(&mut stream)))
}

fn listen_then_talk(mut stream: TcpStream, bytes: u64) -> anyhow::Result<(Received, Digest)> {
    let received = net::drain(&mut stream);
    let sent = net::send_pattern(&mut stream, bytes, 4)?;
    stream.flush()?;
    Ok((received, sent))
}
