# Untried: no Docker engine was at hand where this was written.
# docker build -t specbench . ; docker run --rm specbench python run.py
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
WORKDIR /specbench
COPY . .
RUN make setup && make clean
ENV PATH=/specbench/.venv/bin:$PATH
CMD ["python", "run.py"]
