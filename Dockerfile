# lapse in an image of its own: the static binary, the certificates of the usual authorities, nothing else. There is no shell in it; its health
# check is `lapse health`. The time zones are inside the binary.
#
#   docker build --build-arg VERSION=v0.1.0 -t lapse:v0.1.0 .
#   docker build --target stackctl -t lapse-stackctl .        # makes the topic and the groups, see docker-compose.yml

FROM golang:1.26 AS build
WORKDIR /src
# The modules first: they change seldom, and a change of the code alone finds them in the cache of the build.
COPY go.mod go.sum ./
RUN go mod download
COPY . .
ARG VERSION=dev
ENV CGO_ENABLED=0
RUN go build -trimpath -ldflags "-s -w -X main.version=${VERSION}" -o /out/ ./cmd/lapse ./scripts/stackctl

FROM scratch AS stackctl
COPY --from=build /out/stackctl /stackctl
USER 65532:65532
ENTRYPOINT ["/stackctl"]

# The last stage is what `docker build` makes.
FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /out/lapse /lapse
# A number and not a name, so that Kubernetes' runAsNonRoot can tell.
USER 65532:65532
ENTRYPOINT ["/lapse"]
