//! The health service of gRPC (`grpc.health.v1.Health`), as far as a kubelet's probe asks: all is well.

use std::net::TcpListener;

use anyhow::Context;
use bytes::Bytes;
use h2::server::SendResponse;
use http::{HeaderMap, HeaderValue, Request, Response};
use tokio::net::TcpStream;

const CHECK: &str = "/grpc.health.v1.Health/Check";
/// A message: uncompressed, of two bytes; its first field, the status, is `SERVING`.
const SERVING: &[u8] = &[0, 0, 0, 0, 2, 0x08, 1];
/// Status codes of gRPC.
const OK: HeaderValue = HeaderValue::from_static("0");
const UNIMPLEMENTED: HeaderValue = HeaderValue::from_static("12");

/// Answers for good.
pub(super) fn serve(listener: TcpListener) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    runtime.context("start a runtime")?.block_on(async {
        listener
            .set_nonblocking(true)
            .context("make the listener non-blocking")?;
        let listener = tokio::net::TcpListener::from_std(listener).context("take the listener over")?;
        loop {
            let (stream, _) = listener.accept().await.context("accept")?;
            tokio::spawn(connection(stream));
        }
    })
}

async fn connection(stream: TcpStream) -> Result<(), h2::Error> {
    let mut connection = h2::server::handshake(stream).await?;
    while let Some(request) = connection.accept().await {
        let (request, respond) = request?;
        tokio::spawn(answer(request, respond));
    }
    Ok(())
}

async fn answer(request: Request<h2::RecvStream>, mut respond: SendResponse<Bytes>) -> Result<(), h2::Error> {
    let is_check = request.uri().path() == CHECK;
    let mut body = request.into_body();
    while let Some(data) = body.data().await {
        body.flow_control().release_capacity(data?.len())?;
    }
    let mut response = Response::new(());
    let grpc = HeaderValue::from_static("application/grpc");
    response.headers_mut().insert(http::header::CONTENT_TYPE, grpc);
    let mut stream = respond.send_response(response, false)?;
    if is_check {
        stream.send_data(Bytes::from_static(SERVING), false)?;
    }
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", if is_check { OK } else { UNIMPLEMENTED });
    stream.send_trailers(trailers)
}
