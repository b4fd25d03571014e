"""A merged model behind HTTP, watched by a canary, with its metrics for Prometheus.

    python examples/canary.py [PORT]          # the embedded model on loopback

    curl -X POST --data-binary @pixels.bin http://127.0.0.1:8000/predict     # 28 × 28 bytes, grey
    curl http://127.0.0.1:8000/metrics

Any other server works in the same way: call the canary instead of the model. With Ray Serve, make the canary in the
constructor of the deployment; every replica has its own.
"""

from __future__ import annotations

import sys

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response

import tokenmerge as tm
from tokenmerge.data import embedded


def make_app(fraction: float = 0.05, promise: float = 0.98) -> FastAPI:
    images = embedded.load_images("test", 1)
    model = tm.apply(embedded.load_model(), tm.ATM(0.98, 0.04, 0.84, batch="each"))
    canary = tm.Canary(model, fraction, promise, fallback=True)
    app = FastAPI()

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, int]:
        pixels = await request.body()
        if len(pixels) != 28 * 28:
            raise HTTPException(422, f"give 28 × 28 bytes, not {len(pixels)}")
        image = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).reshape(1, 1, 28, 28) / 255
        logits = canary((image - images.source.mean[0]) / images.source.std[0])
        return {"label": int(logits.argmax())}

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(canary.prometheus(), media_type="text/plain; version=0.0.4")

    @app.on_event("shutdown")
    def stop() -> None:
        canary.close()

    return app


if __name__ == "__main__":
    uvicorn.run(make_app(), host="127.0.0.1", port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000)
