"""Which model a request may run, checked on every name that it gives."""

from starlette.requests import Request

from gateway.errors import ApiError, ForeignAccount, ModelForbidden
from gateway.prompt.schema import bad_input
from gateway.services import ServedModel, Services
from gateway.tenants.model import Tenant


def tenant_of(request: Request) -> Tenant:
    """Who is asking; if the path names an account, it is the tenant's.

    Raises:
        ForeignAccount: the path names another account.
    """
    tenant: Tenant = request.scope["state"]["tenant"]
    account = request.path_params.get("account")
    if account is not None and account != tenant.account.id:
        raise ForeignAccount
    return tenant


def model_for(
    services: Services, tenant: Tenant, names: tuple[str | None, ...], unknown: type[ApiError]
) -> ServedModel:
    """The model that path, query and body name. The one that runs is the one that was checked.

    Raises:
        unknown: no such model. ModelForbidden: the key may not use one of them.
        InvalidRequest: they name different models.
    """
    found: list[ServedModel] = []
    for name in names:
        if name is None:
            continue
        served = services.model(name)
        if served is None:
            raise unknown(param="model")
        if not tenant.may_use(served.facts.id):
            raise ModelForbidden(param="model")
        found.append(served)
    if any(served is not found[0] for served in found):
        raise bad_input("path, query and '/model' name different models", "model")
    return found[0]
